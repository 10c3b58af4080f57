// L2: the yard-stick. Must not wait for ever, and must not do more than the algorithm needs.
//
// A segment of the data is as long as a slot and is cut into a chunk for each rank. Each rank
// copies the chunks of its peers into its slot; barrier; folds the peers' terms of its own chunk,
// in the order of ranks, and publishes the sums in its slot; barrier; copies the peers' sums out.
// Two slots a rank take turns, so that nobody overwrites what a peer still reads. Per rank, (n - 1)
// / n of the data is stored twice and read twice across ranks; nothing can do with less through a
// slot.
#include "limit.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

namespace horovod {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kPage = 4096;
constexpr size_t kLine = kAlignment / sizeof(float);
constexpr int kSpins = 2000;  // some microseconds

struct alignas(kAlignment) Position {
  std::atomic<uint64_t> value;
};

uint64_t slots_at(int32_t size) {
  const uint64_t bytes = static_cast<uint64_t>(size) * sizeof(Position);
  return (bytes + kPage - 1) / kPage * kPage;
}

Position& position(const Mapping& memory, int32_t rank) {
  return reinterpret_cast<Position*>(memory.get())[rank];
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::byte* bytes_of(float* data) { return reinterpret_cast<std::byte*>(data); }

}  // namespace

uint64_t limit_bytes(int32_t size, uint64_t slot_bytes) {
  return slots_at(size) + static_cast<uint64_t>(size) * 2 * slot_bytes;
}

Limit::Limit(LimitOptions options) : options_(std::move(options)) {
  if (options_.size < 2 || options_.rank < 0 || options_.rank >= options_.size) {
    throw Error(ErrorKind::InvalidArgument, "rank " + std::to_string(options_.rank) + " of " +
                                                std::to_string(options_.size) +
                                                " can't share memory with others");
  }
}

void Limit::await(int32_t rank) const {
  const auto& reached = position(options_.memory, rank).value;
  for (int spins = 0; spins < (options_.spin ? kSpins : 1); ++spins) {
    if (reached.load(std::memory_order_acquire) >= round_) return;
    relax();
  }
  const auto deadline = Clock::now() + options_.patience;
  while (reached.load(std::memory_order_acquire) < round_) {
    ::sched_yield();
    if (Clock::now() >= deadline) {
      const auto waited = std::chrono::duration_cast<std::chrono::seconds>(options_.patience);
      throw Error(ErrorKind::PeerLost,
                  "local rank " + std::to_string(rank) +
                      " did not come to the yard-stick's barrier within " +
                      std::to_string(waited.count()) + " s",
                  rank);
    }
  }
}

void Limit::barrier() {
  position(options_.memory, options_.rank).value.store(++round_, std::memory_order_release);
  for (int32_t rank = 0; rank < options_.size; ++rank) await(rank);
}

Limit::Range Limit::chunk(int32_t rank, size_t count) const {
  const auto size = static_cast<size_t>(options_.size);
  const size_t each = ((count + size - 1) / size + kLine - 1) / kLine * kLine;
  const size_t begin = std::min(count, static_cast<size_t>(rank) * each);
  return {begin, std::min(count, begin + each) - begin};
}

std::byte* Limit::slot(int32_t rank, uint64_t half, uint64_t slot_bytes) const {
  const uint64_t number = static_cast<uint64_t>(rank) * 2 + half;
  return options_.memory.get() + slots_at(options_.size) + number * slot_bytes;
}

Limit::Span Limit::allreduce(float* data, size_t count, uint64_t slot_bytes, Stores stores) {
  if (slot_bytes == 0 || slot_bytes % kAlignment != 0 || slot_bytes > options_.slot_bytes) {
    throw Error(ErrorKind::InvalidArgument, "a slot has a multiple of 64 bytes, at most " +
                                                std::to_string(options_.slot_bytes) + ", and not " +
                                                std::to_string(slot_bytes));
  }
  const size_t segment = slot_bytes / sizeof(float);
  barrier();
  const auto begin = Clock::now();
  uint64_t half = 0;
  for (size_t at = 0; at < count; at += segment, half ^= 1) {
    reduce_segment(data + at, std::min(segment, count - at), half, slot_bytes, stores);
  }
  return {begin, Clock::now()};
}

void Limit::reduce_segment(float* data, size_t count, uint64_t half, uint64_t slot_bytes,
                           Stores stores) {
  const Kernels& kernels = *options_.kernels;
  std::byte* const out = slot(options_.rank, half, slot_bytes);
  for (int32_t rank = 0; rank < options_.size; ++rank) {
    if (rank == options_.rank) continue;
    const Range theirs = chunk(rank, count);
    kernels.copy_to_slot(out + theirs.begin * sizeof(float), stores, bytes_of(data + theirs.begin),
                         theirs.count * sizeof(float));
  }
  store_fence();
  barrier();

  const Range own = chunk(options_.rank, count);
  if (own.count > 0) {
    terms_.clear();
    for (int32_t rank = 0; rank < options_.size; ++rank) {
      terms_.push_back(rank == options_.rank
                           ? bytes_of(data + own.begin)
                           : slot(rank, half, slot_bytes) + own.begin * sizeof(float));
    }
    kernels.fold({.dtype = DType::Float32, .op = ReduceOp::Sum}, bytes_of(data + own.begin),
                 out + own.begin * sizeof(float), stores, terms_.data(), terms_.size(), own.count);
  }
  store_fence();
  barrier();

  for (int32_t rank = 0; rank < options_.size; ++rank) {
    if (rank == options_.rank) continue;
    const Range theirs = chunk(rank, count);
    std::memcpy(data + theirs.begin, slot(rank, half, slot_bytes) + theirs.begin * sizeof(float),
                theirs.count * sizeof(float));
  }
}

}  // namespace horovod
