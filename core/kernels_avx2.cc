// L1: the kernels in AVX2 and F16C. Must not hold code of its own.
#include "kernels_adasum.h"
#include "kernels_body.h"

namespace horovod {

extern const Kernels kAvx2;
constinit const Kernels kAvx2{"avx2", fold, copy_to_slot, products, combine};

}  // namespace horovod
