// L3: the algorithms: pure functions (rank, size, counts) -> Schedule. Must not know transports or
// engines.
//
// Vocabulary: one *chunk* of the data per rank, each cut into *segments* of at most
// `segment_bytes`, the largest piece that travels in one slot. All counts are padded bytes
// (multiples of kAlignment).
#pragma once

#include <cstdint>
#include <span>

#include "schedule.h"

namespace horovod {

struct Place {
  int32_t rank = 0;
  int32_t size = 1;
  uint64_t segment_bytes = 0;
};

// Both give every element the same association, a left fold in rank order, so they may be chosen by
// size.
Schedule allreduce_direct(const Place& place, uint64_t bytes);
Schedule allreduce_chunked(const Place& place, uint64_t bytes);

// `chunks[r]` is what rank r ends up with; the input holds all chunks, the output only one's own.
Schedule reducescatter(const Place& place, std::span<const uint64_t> chunks);

// `chunks[r]` is what rank r contributes; the output holds all in rank order.
Schedule allgather(const Place& place, std::span<const uint64_t> chunks);

Schedule broadcast(const Place& place, int32_t root, uint64_t bytes);

// `to[r]` bytes of the input go to rank r, `from[r]` come from it; both vectors are laid out in
// rank order.
Schedule alltoall(const Place& place, std::span<const uint64_t> to, std::span<const uint64_t> from);

}  // namespace horovod
