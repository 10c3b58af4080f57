// L5: one pass over everything an engine has to do, without ever blocking: new calls, control
// messages, decisions, the entries in flight. Must not know threads, handles or how anyone waits;
// whoever drives calls it.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "announcer.h"
#include "collective.h"
#include "coordinator.h"
#include "mesh.h"
#include "transport.h"
#include "wire.h"

namespace horovod {

// What shapes schedules and agreement: rank 0's, the same on every rank.
struct Plan {
  uint64_t fusion_threshold_bytes = 32ull << 20;
  uint64_t cycle_time_us = 0;  // deliberate waiting; 0 = driven by events alone
  uint64_t segment_bytes = 1ull << 20;
  uint64_t outbox_bytes = 8ull << 20;
  uint64_t direct_bytes = 16ull << 10;
  uint64_t inline_bytes = 4ull << 10;  // of terms that travel inside the negotiation
  uint64_t cache_capacity = 64ull << 10;
  uint64_t join_all_ops = 0;  // 0 or 1, as the next
  uint64_t disable_group_fusion = 0;

  uint64_t hash() const;
};

// Its fields by name: whoever reads, sends or compares a plan goes through this list.
struct PlanField {
  const char* name;
  uint64_t Plan::* value;
};
inline constexpr std::array kPlanFields{
    PlanField{"fusion_threshold_bytes", &Plan::fusion_threshold_bytes},
    PlanField{"cycle_time_us", &Plan::cycle_time_us},
    PlanField{"segment_bytes", &Plan::segment_bytes},
    PlanField{"outbox_bytes", &Plan::outbox_bytes},
    PlanField{"direct_bytes", &Plan::direct_bytes},
    PlanField{"inline_bytes", &Plan::inline_bytes},
    PlanField{"cache_capacity", &Plan::cache_capacity},
    PlanField{"join_all_ops", &Plan::join_all_ops},
    PlanField{"disable_group_fusion", &Plan::disable_group_fusion},
};

// This rank's side of a call, from submit to take.
struct LocalCall : Arguments {
  Request request;
  bool blocked = false;  // a caller waits for it; the engine's until the driver takes the call
  bool taken = false;    // the driver has it; the engine's, as the next
  bool waited = false;   // a caller waits for it, and the driver knows or will
  const std::string* site = nullptr;  // where the program made it, kept by the engine
  // If set, nobody waits for the call or takes it: this is run once when it is done, by whoever
  // drives and without a lock of its users'. It may submit, and must not wait or throw.
  std::function<void(LocalCall&)> when_done;

  Status status;      // results, valid once done
  int64_t value = 0;  // join: who joined last; process sets: the uid
  std::atomic<bool> done{false};
};
using LocalCallPtr = std::shared_ptr<LocalCall>;

struct ProgressOptions {
  int32_t rank = 0;
  std::vector<std::string> names;  // by rank: "hostname, pid 123"
  Plan plan;
  std::unique_ptr<Transport> transport;
  const Kernels* kernels = nullptr;
  StoreChoice stores;
  uint32_t first_set = 1;  // rank 0's counts: the number of the process set that is added first
  Duration stall_warning{}, stall_shutdown{}, deadlock{}, heartbeat{};  // 0 = never
};

class Progress {
 public:
  explicit Progress(ProgressOptions options);

  // What happened on this rank since the last pass.
  void submit(LocalCallPtr call, TimePoint now);
  void blocked(const LocalCall& call, TimePoint now);
  void reject(Reject reject, TimePoint now);
  void leave(TimePoint now);
  void peer_closed(int32_t rank);  // its process ended or it closed the connection

  // Does what can be done at `now`; whether anything moved. Like the others it may throw, Error or
  // std::bad_alloc; then fail() is the only thing left to do.
  bool pass(TimePoint now);
  // When pass() has to run again even if nothing arrives; TimePoint::max() if never.
  TimePoint next_deadline() const;
  // Whether pass() would find nothing; asked after transport().sleep(true).
  bool idle() { return transport_->idle(); }

  // No call of this rank is open: nobody waits for it.
  bool at_rest() const { return open_calls_ == 0; }

  // Ends the epoch on this rank: fails every call and, unless they know, tells all peers why.
  void fail(Status status, bool tell = true);
  // The same for what one of the above threw: a peer that breaks the protocol, or memory that was
  // refused in the middle of an entry that others run.
  void fail_because_of(const std::exception& error);
  const std::optional<Status>& failure() const { return failure_; }

  bool drained() const;                // after leave(): all that was agreed before it has been run
  bool others_left() const;            // whom this rank coordinates
  void goodbye(const Status& status);  // the last message to every peer
  bool flush();                        // whether all control messages have gone out

  // Calls that ended since the last time, in the order in which they ended.
  void take_completed(std::vector<LocalCallPtr>& calls) {
    calls.clear();
    calls.swap(completed_);
  }
  std::vector<LogLine> take_log() { return std::move(log_); }
  const std::map<uint32_t, std::vector<int32_t>>& sets() const { return sets_; }
  Transport& transport() { return *transport_; }

  struct Counters {
    uint64_t entries = 0, inline_entries = 0, calls = 0, fused_calls = 0, passes = 0;
  };
  const Counters& counters() const { return counters_; }
  Coordinator::Counters coordinator_counters() const;

 private:
  struct Running {
    Entry entry;
    std::vector<LocalCallPtr> calls;
    std::vector<int32_t> members;  // of the set when the entry came: it may be removed meanwhile
    std::unique_ptr<Collective> collective;  // once it is its turn
  };

  int32_t size() const { return static_cast<int32_t>(names_.size()); }
  void say(Item item, TimePoint now);
  bool read_control(TimePoint now);
  void handle(int32_t from, Frame&& frame, TimePoint now);
  bool coordinate(TimePoint now);
  void send(const Outgoing& outgoing);
  void receive(Decision&& decision, TimePoint now);
  void receive_entry(Entry&& entry);
  Located answer(const Locate& question);
  void finish_control(const Entry& entry, const LocalCallPtr& call);
  bool advance_running();
  void reduce_inline(const Entry& entry, const std::vector<LocalCallPtr>& calls);
  void start(Running& running);
  void finish(Running& running, TimePoint now);
  bool flush_control();
  bool said_all() const;
  void give_sign_of_life(TimePoint now);
  bool pass_after_failure(TimePoint now);
  void look_for_life(TimePoint now);
  void check_closed_peers();
  void complete(const LocalCallPtr& call, Status status);

  const int32_t rank_;
  const std::vector<std::string> names_;
  const Plan plan_;
  const uint64_t plan_hash_;
  std::unique_ptr<Transport> transport_;
  Mesh mesh_;
  Announcer<LocalCallPtr> announcer_;
  std::unique_ptr<Coordinator> coordinator_;  // on rank 0
  std::vector<Outgoing> outgoing_;            // scratch of coordinate(), as the next
  std::string frame_;
  bool coordinate_ = false;  // something was received since it last decided

  std::map<uint32_t, std::vector<int32_t>> sets_;  // uid -> members
  std::deque<Running> running_;                    // agreed, in the global order
  size_t open_calls_ = 0;                          // submitted and not complete
  std::string last_name_;                          // of the call that was submitted last
  const std::string* last_site_ = nullptr;
  std::vector<LocalCallPtr> completed_;
  std::vector<LogLine> log_;

  struct Peer {
    std::string in, out;  // control bytes: a partial frame that came, and what didn't fit yet
    bool closed = false;  // the connection ended
    bool gone = false;    // it said goodbye in good order
    uint64_t beats = 0;
    TimePoint alive{};
  };
  std::vector<Peer> peers_;
  Duration heartbeat_;
  TimePoint last_beat_{}, last_look_{}, next_look_{};
  std::optional<Status> failure_;
  bool leaving_ = false, acknowledged_ = false;
  Counters counters_;
};

}  // namespace horovod
