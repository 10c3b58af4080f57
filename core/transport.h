// L2: bytes from one rank to a set of ranks, in slots. Must not know what the bytes mean.
//
// A transport belongs to one engine and is used by one thread at a time (whoever drives), except
// ring_self(). A slot is written once by its writer and read by every rank of its set. For each
// pair of ranks slots arrive in the order in which they were published. Nothing here blocks: what
// can't be done now says so and is tried again after a wake-up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels.h"
#include "types.h"

namespace horovod {

// A slot that arrived, and what it was written with.
struct Arrival {
  const std::byte* data = nullptr;  // null: it hasn't
  Stores stores = Stores::Ordinary;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // The largest slot that reserve() gives.
  virtual uint64_t max_slot_bytes() const = 0;

  // A slot of `bytes` (a multiple of kAlignment) that the ranks `to` will read; nullptr if there is
  // no room now. The entry that is its rank's `oldest` has room of its own, so that younger ones
  // whose readers aren't there yet can't starve it. At most one slot is reserved and unpublished.
  virtual std::byte* reserve(std::span<const int32_t> to, uint64_t bytes, bool oldest) = 0;

  // Makes the reserved slot visible to its readers and wakes those that sleep. It was written with
  // `stores`, all of which are visible.
  virtual void publish(Stores stores) = 0;

  // The next unread slot from rank `from`, which must have `bytes`. Throws Error(InvalidArgument)
  // if the sizes differ: the two sides don't run the same schedule.
  virtual Arrival peek(int32_t from, uint64_t bytes) = 0;

  // Hands the slot that peek() returned back to its writer.
  virtual void consume(int32_t from) = 0;

  // A byte stream beside the slots, for control messages. write_control() takes what fits and
  // returns how much that was.
  virtual size_t write_control(int32_t to, std::span<const std::byte> bytes) = 0;
  virtual std::span<const std::byte> read_control(int32_t from) = 0;
  virtual void consume_control(int32_t from, size_t bytes) = 0;

  // Sleeping: call sleep(true), then check idle(); only if it is still true wait for the doorbell.
  // Peers ring only a rank that says it sleeps.
  virtual void sleep(bool asleep) = 0;
  virtual bool idle() = 0;  // nothing new has arrived, and no room that was missing has been freed
  virtual void ring_self() = 0;  // from any thread

  // A life sign: advance it now and then; peers see the count.
  virtual void beat() = 0;
  virtual uint64_t beats_of(int32_t rank) = 0;
};

}  // namespace horovod
