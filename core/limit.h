// L2: the yard-stick: an allreduce of float32 that does nothing but move and add bytes through
// shared slots, which is what this machine's memory allows. Must not know engines, schedules, the
// wire or where the memory came from.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "shm.h"

namespace horovod {

struct LimitOptions {
  int32_t rank = 0;
  int32_t size = 1;         // ranks that share the memory
  Mapping memory;           // limit_bytes(size, slot_bytes), zero at first, the same for all ranks
  uint64_t slot_bytes = 0;  // the most that a slot may have; a multiple of kAlignment
  const Kernels* kernels = nullptr;
  std::chrono::nanoseconds patience{};  // how long to wait for a peer
  bool spin = false;                    // before yielding; where ranks have a core each
};

// Bytes of shared memory for `size` ranks with slots of at most `slot_bytes`.
uint64_t limit_bytes(int32_t size, uint64_t slot_bytes);

// One rank's side. All ranks make the same calls in the same order. A call that waits for a peer
// beyond the patience throws Error(PeerLost); no call may follow it.
class Limit {
 public:
  // When the barrier at the start of a call was over on this rank, and when all of it was.
  struct Span {
    std::chrono::steady_clock::time_point begin, end;
  };

  explicit Limit(LimitOptions options);

  void barrier();

  // Sums `count` elements of all ranks, in place, in segments of `slot_bytes` (at most the
  // options', and a multiple of kAlignment). Starts with a barrier.
  Span allreduce(float* data, size_t count, uint64_t slot_bytes, Stores stores);

 private:
  struct Range {
    size_t begin, count;
  };

  Range chunk(int32_t rank, size_t count) const;
  std::byte* slot(int32_t rank, uint64_t half, uint64_t slot_bytes) const;
  void reduce_segment(float* data, size_t count, uint64_t half, uint64_t slot_bytes, Stores stores);
  void await(int32_t rank) const;

  const LimitOptions options_;
  uint64_t round_ = 0;                   // barriers of this rank
  std::vector<const std::byte*> terms_;  // by rank
};

}  // namespace horovod
