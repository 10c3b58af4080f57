// L4: decides what runs next, for all ranks: a pure function of (messages, state, now). Must not do
// I/O, own a thread or read a clock.
//
// A call is ready when every member of its set has announced it or has joined. Ready calls are
// checked for agreement and become entries of one global order; a disagreement becomes an error
// entry in the same order, and its name is free again. Fusion clocks itself: an entry is emitted
// when a contributor is blocked, or enough bytes are ready, or the oldest ready call has waited
// long enough, and fewer than two entries of its set are in flight.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "types.h"
#include "wire.h"

namespace horovod {

using TimePoint = std::chrono::steady_clock::time_point;
using Duration = std::chrono::steady_clock::duration;

struct CoordinatorOptions {
  std::vector<std::string> names;  // by rank, for messages: "hostname, pid 123"
  uint64_t fusion_threshold_bytes = 128ull << 20;
  uint64_t max_entry_bytes = 32ull << 20;
  uint64_t flush_bytes = 1ull << 20;                    // emit at once from this many ready bytes
  Duration flush_after = std::chrono::milliseconds(1);  // or when the oldest ready call is this old
  // > 0: calls that could fuse wait this long for company, even if someone is blocked, unless a
  // whole entry is full. Replaces flush_bytes and flush_after.
  Duration min_cycle{};
  uint64_t inline_bytes = 0;  // an entry whose terms take no more carries them; 0: none does
  size_t cache_capacity = 64 << 10;
  bool join_all_ops = false;
  bool disable_group_fusion = false;
  uint64_t plan_hash = 0;
  uint32_t first_set = 1;  // the number of the set that is added first; the others follow
  Duration stall_warning = std::chrono::seconds(60);  // 0 = never, as for the next two
  Duration stall_shutdown{};
  Duration deadlock = std::chrono::seconds(60);
  // How long every rank must wait, with nothing that could run, before calls that look like one
  // call made differently (another operation or process set) are taken for that.
  Duration crossed = std::chrono::seconds(1);
  // How long a report waits for ranks to say where in their program they are; 0 = nobody is asked.
  Duration answers = std::chrono::milliseconds(500);
};

struct LogLine {
  int level;  // as Python's logging: 20 info, 30 warning, 40 error
  std::string text;
};

struct Outgoing {
  std::vector<int32_t> to;  // global ranks
  Decision decision;
};

class Coordinator {
 public:
  explicit Coordinator(CoordinatorOptions options);
  ~Coordinator();

  // Takes one item of `rank`. A malformed or impossible item (unknown set, rank outside the set) is
  // answered, never fatal.
  void receive(int32_t rank, Item item, TimePoint now);

  // Emits all that can be emitted at `now` into `out`, and what is worth a log line into `log`.
  void decide(TimePoint now, std::vector<Outgoing>& out, std::vector<LogLine>& log);

  // When decide() has to be called again even if nothing arrives; TimePoint::max() if never.
  TimePoint next_deadline() const;

  bool all_left() const;  // every rank said Leave

  struct Counters {
    uint64_t entries = 0, tensors = 0, fused_tensors = 0, cached_announcements = 0, errors = 0;
  };
  const Counters& counters() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace horovod
