// L1: the kernels in what every processor has. Must not hold code of its own.
#include "kernels_adasum.h"
#include "kernels_body.h"

namespace horovod {

extern const Kernels kBaseline;
constinit const Kernels kBaseline{"baseline", fold, copy_to_slot, products, combine};

}  // namespace horovod
