// L1: the kernels in AVX-512 (F, BW, VL, DQ). Must not hold code of its own.
#include "kernels_adasum.h"
#include "kernels_body.h"

namespace horovod {

extern const Kernels kAvx512;
constinit const Kernels kAvx512{"avx512", fold, copy_to_slot, products, combine};

}  // namespace horovod
