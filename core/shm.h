// L2: the transport between ranks of one host: one outbox of shared memory per rank, read by many.
// Must not know schedules or where the memory came from: it is handed plain mappings and doorbell
// descriptors.
#pragma once

#include <memory>
#include <vector>

#include "transport.h"

namespace horovod {

// Bytes that a rank's segment needs for `ranks` ranks and an outbox of `outbox_bytes` of slots.
uint64_t segment_bytes(size_t ranks, uint64_t outbox_bytes);

// A shared mapping of the whole memfd `fd`, which must have `bytes`; not inherited by forked
// children. Unmapped by the deleter. Throws Error(Resource).
using Mapping = std::shared_ptr<std::byte>;
Mapping map_segment(int fd, uint64_t bytes);
// The same of private memory, for a world of one and for threads as ranks under TSAN, which can't
// see through two mappings of one file.
Mapping anonymous_segment(uint64_t bytes);

struct ShmOptions {
  int32_t rank = 0;
  uint64_t outbox_bytes = 0;
  std::vector<Mapping> segments;  // by rank
  std::vector<int> doorbells;     // eventfds by rank; borrowed
};

std::unique_ptr<Transport> make_shm(ShmOptions options);

}  // namespace horovod
