// L4: whom everybody waits for, and since when: the stall warnings, their limit, and the deadlock
// pattern. Must not decide what runs.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "calls.h"
#include "coordinator.h"
#include "inquiry.h"
#include "types.h"

namespace horovod {

// What the clocks are judged by; all views are the coordinator's own.
struct Scene {
  const CallList& waiting;
  const std::map<uint32_t, ProcessSet>& sets;
  std::span<const uint8_t> joined;  // by rank
  std::span<const uint8_t> left;
  bool all_blocked = false;  // every live rank waits, and nothing is ready or in flight
};

// Two calls by whose ranks each waits for the other: one call, made differently.
struct Crossing {
  Call* first;
  Call* second;
  std::string text;
};

class Watch {
 public:
  explicit Watch(const CoordinatorOptions& options);

  void heard(int32_t rank, OpKind kind, const std::string& name, TimePoint now);
  void arrived(TimePoint now) { last_arrival_ = now; }
  void located(int32_t rank, const Located& answer);
  // A call is waited for no more.
  void resolved(Call& call, TimePoint now);

  // Warns where it is due; a status if the epoch has to end. Both ask first and wait for answers.
  std::optional<Status> look(const Scene& scene, CallList& waiting, TimePoint now);
  // Calls that have to fail so that their ranks can go on, once they have waited long enough.
  std::optional<Crossing> look_for_crossing(const Scene& scene, CallList& waiting, TimePoint now);
  TimePoint next_deadline(const Scene& scene) const;

  // Move what there is to say, or to ask, to the end of the list.
  void take_log(std::vector<LogLine>& log);
  void take_questions(std::vector<Outgoing>& out);

 private:
  struct LastCall {
    OpKind kind = OpKind::Allreduce;
    std::string name;
    TimePoint when;
    bool any = false;
  };
  // Calls that wait for the same ranks, and what there is to say about them.
  struct Stall {
    TimePoint since;
    size_t open = 0;  // calls that still wait
    std::vector<std::string> calls;
    std::vector<int32_t> waiting, missing;  // ranks
    std::string first;                      // the name of the first call, and a rank that waits
    int32_t caller = -1;
    const char* hint = "";
    Inquiry inquiry;
    bool told = false;
  };
  // Why the epoch has to end, if it still has to once the answers are there.
  struct Verdict {
    const Call* call;  // that waited for too long; nullptr: a deadlock
    std::string name;  // of the call
    uint32_t set;
    Inquiry inquiry;
  };

  void open_stalls(const Scene& scene, const std::vector<Call*>& calls, TimePoint now);
  void tell(Stall& stall, TimePoint now);
  std::optional<Verdict> judge(const Scene& scene, TimePoint now) const;
  std::string describe_missing(const std::vector<int32_t>& missing, const Inquiry& inquiry,
                               TimePoint now) const;
  Status stalled(const Scene& scene, const Verdict& verdict, TimePoint now) const;
  Status deadlocked(const Scene& scene, const Inquiry& inquiry) const;

  const CoordinatorOptions& options_;
  Duration shutdown_;  // stall_shutdown, or 0 where it is ignored
  TimePoint last_arrival_;
  TimePoint looked_at_;         // the last arrival when crossings were looked for
  std::vector<LastCall> last_;  // by rank
  std::map<uint64_t, Stall> stalls_;
  uint64_t next_stall_ = 1;
  std::optional<Verdict> verdict_;
  uint64_t next_question_ = 1;
  std::vector<Outgoing> questions_;
  std::vector<LogLine> log_;
};

}  // namespace horovod
