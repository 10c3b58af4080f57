// L1: chooses the kernels that this processor can run. Must not contain kernels.
#include "kernels.h"

#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace horovod {

extern const Kernels kBaseline;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

namespace {

struct Variant {
  std::string_view name;
  const Kernels* kernels;  // null where the build lacks it
  bool (*runs_here)();
};

// The best first.
#if defined(__x86_64__)
// The builtins ask the operating system too: whether it saves the wide registers.
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
constexpr Variant kVariants[] = {
    {"avx512", &kAvx512, has_avx512},
    {"avx2", &kAvx2, has_avx2},
    {"baseline", &kBaseline, [] { return true; }},
};
#else
constexpr Variant kVariants[] = {
    {"avx512", nullptr, nullptr},
    {"avx2", nullptr, nullptr},
    {"baseline", &kBaseline, [] { return true; }},
};
#endif

}  // namespace

const Kernels& kernels(std::string_view name) {
  for (const Variant& variant : kVariants) {
    if (name != "auto" && name != variant.name) continue;
    if (variant.kernels != nullptr && variant.runs_here()) return *variant.kernels;
    if (name != "auto") {
      throw Error(ErrorKind::Unavailable, std::string(name) +
                                              " kernels don't run on this processor; use auto, or "
                                              "baseline, which runs everywhere");
    }
  }
  throw Error(ErrorKind::InvalidArgument, "no kernels are called '" + std::string(name) +
                                              "'; there are auto, baseline, avx2 and avx512");
}

void store_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace horovod
