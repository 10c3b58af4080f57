// L4: which ready calls may share an entry. Must not know when they do.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "types.h"
#include "wire.h"

namespace horovod {

// Of one entry that fuses: calls looked at behind the first one, whether they fit or not, and bytes
// of names, so that an entry stays a small message.
inline constexpr size_t kLookAhead = 4096;
inline constexpr size_t kMaxNameBytes = 4 << 20;

// What a call takes in the virtual vector of its entry. Saturates: such a call goes alone.
inline uint64_t bytes_of(const Request& request) {
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max() / 4;
  uint64_t sum = 0;
  for (const TensorSpec& tensor : request.tensors) {
    const uint64_t bytes = count_of(tensor.shape) * info(tensor.dtype).size;
    sum = std::min(kMost, sum + align_up(std::min(kMost, bytes)));
  }
  return sum;
}

struct FusionLimits {
  uint64_t entry_bytes = 0;  // 0: nothing fuses
  bool groups_apart = false;
};

// Whether company can make sense for a call at all; if not, nothing is gained by waiting.
inline bool may_fuse(const Request& request, uint64_t bytes, const FusionLimits& limits) {
  return info(request.kind).fuses && bytes < limits.entry_bytes &&
         !(limits.groups_apart && request.tensors.size() > 1);
}

// Whether two calls of one set, with equal contributors, ask for the same thing. Their dtypes may
// differ. Scales are compared as bits: equal means the same results.
inline bool same_work(const Request& a, const Request& b) {
  const auto bits = [](double value) { return std::bit_cast<uint64_t>(value); };
  return a.kind == b.kind && a.op == b.op && bits(a.prescale) == bits(b.prescale) &&
         bits(a.postscale) == bits(b.postscale);
}

}  // namespace horovod
