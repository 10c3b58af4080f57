// L4: what the coordinator remembers and the steps it takes; coordinator.cc takes what ranks say,
// order.cc makes entries of it. Must not be included by anyone else.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "agreement.h"
#include "cache.h"
#include "calls.h"
#include "coordinator.h"
#include "fusion.h"
#include "types.h"
#include "watch.h"
#include "wire.h"

namespace horovod {

struct Coordinator::State {
  explicit State(CoordinatorOptions given);

  // What ranks say.
  void on(int32_t rank, Announce&& item, TimePoint now);
  void on(int32_t rank, AnnounceCached&& item, TimePoint now);
  void on(int32_t rank, Blocked&& item, TimePoint now);
  void on(int32_t rank, Reject&& item, TimePoint now);
  void on(int32_t rank, Done&& item, TimePoint now);
  void on(int32_t rank, Leave&& item, TimePoint now);
  void on(int32_t rank, Located&& item, TimePoint now);
  void announce(int32_t rank, Voice voice, TimePoint now);
  Status objection(int32_t rank, const Request& request) const;
  Status set_objection(int32_t rank, OpKind kind, uint32_t set, const std::string& name) const;
  Call& start_call(ProcessSet& set, OpKind kind, const std::string& name, TimePoint now);
  Call& find_or_start(ProcessSet& set, OpKind kind, const std::string& name, TimePoint now);
  void hear(ProcessSet& set, Call& call, int32_t rank, Voice said, TimePoint now);
  void hear_rejection(ProcessSet& set, int32_t rank, Reject&& item, TimePoint now);
  void hear_twice(ProcessSet& set, Call& call, int32_t rank, TimePoint now);
  void replay(TimePoint now);

  // Calls that all members have spoken about.
  void complete(Call& call, TimePoint now);
  Status judge(const ProcessSet& set, Call& call);
  Status describe_rejection(const Call& call) const;
  Entry entry_of(const ProcessSet& set, const Call& call) const;
  void make_ready(ProcessSet& set, Call& call, TimePoint now);
  void complete_join(ProcessSet& set, Call& call, TimePoint now);
  void complete_add(ProcessSet& set, Call& call, TimePoint now);
  void complete_remove(ProcessSet& set, Call& call, TimePoint now);
  void fail(Call& call, const Status& status, TimePoint now, int32_t except = -1);
  void finish(Call& call, TimePoint now);

  // What ranks are doing.
  void block(int32_t rank, int change);
  void set_joined(int32_t rank, bool joined, TimePoint now);
  void note_waiting(int32_t rank);

  // Entries.
  void emit_ready(ProcessSet& set, TimePoint now);
  bool flush_due(const ProcessSet& set, TimePoint now) const;
  TimePoint flush_time(const ProcessSet& set) const;
  bool someone_waits(const ProcessSet& set) const;
  void emit_data(ProcessSet& set, CallList& from, TimePoint now);
  void take(Call& call, Entry& entry, TimePoint now);
  void acknowledge();
  void emit(Entry entry);
  void emit_error(OpKind kind, uint32_t set, const std::string& name, std::vector<int32_t> to,
                  Status status);
  Scene scene() const;

  const CoordinatorOptions options;
  const FusionLimits limits;
  Counters counters;

  std::map<uint32_t, ProcessSet> sets;
  uint32_t next_set;
  std::vector<std::vector<ProcessSet*>> sets_of;  // by rank
  Calls calls;
  NameCache cache;
  uint64_t next_id = 1;
  uint64_t next_seq = 1;
  uint64_t next_order = 1;
  size_t ready = 0;  // calls

  struct Flight {
    uint64_t seq;
    uint32_t set;
    int32_t reporter;
  };
  std::vector<Flight> flights;

  std::vector<uint8_t> joined, left, waiting;  // by rank
  std::vector<std::string> left_text;
  std::vector<size_t> blocked;  // by rank: blocked calls without an entry
  size_t waiting_ranks = 0;     // live ranks that are blocked or joined
  size_t live_ranks = 0;
  // By rank: ids it was asked to resend, and its calls that concern all ranks: they end or exclude
  // other calls and must not overtake those.
  std::vector<std::vector<uint64_t>> owed;
  std::vector<std::vector<Announce>> late;
  std::vector<int32_t> leaving;  // not acknowledged yet
  int32_t last_joined = -1;

  std::vector<Outgoing> outbox;
  std::deque<Held> held;  // their next round can start
  Watch watch;
  bool aborted = false;

  std::vector<Vote> votes;            // scratch of judge()
  std::vector<int32_t> absent;        // scratch of judge()
  std::vector<std::string> payloads;  // scratch of emit_data(), by contributor
};

}  // namespace horovod
