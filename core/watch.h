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
  // A call is waited for no more.
  void resolved(Call& call, TimePoint now);

  // Warns where it is due; a status if the epoch has to end.
  std::optional<Status> look(const Scene& scene, CallList& waiting, TimePoint now);
  // Calls that have to fail so that their ranks can go on, once they have waited long enough.
  std::optional<Crossing> look_for_crossing(const Scene& scene, CallList& waiting, TimePoint now);
  TimePoint next_deadline(const Scene& scene) const;

  // Moves what there is to say to the end of `log`.
  void take_log(std::vector<LogLine>& log);

 private:
  struct LastCall {
    OpKind kind = OpKind::Allreduce;
    std::string name;
    TimePoint when;
    bool any = false;
  };
  struct Stall {
    TimePoint since;
    size_t open = 0;   // calls that still wait
    size_t calls = 0;  // calls that were reported
    std::string first;
  };

  void warn(const Scene& scene, const std::vector<Call*>& calls, TimePoint now);
  std::string describe_missing(int32_t rank, TimePoint now) const;
  Status stalled(const Scene& scene, const Call& call, TimePoint now) const;
  Status deadlocked(const Scene& scene) const;

  const CoordinatorOptions& options_;
  Duration shutdown_;  // stall_shutdown, or 0 where it is ignored
  TimePoint last_arrival_;
  TimePoint looked_at_;         // the last arrival when crossings were looked for
  std::vector<LastCall> last_;  // by rank
  std::map<uint64_t, Stall> stalls_;
  uint64_t next_stall_ = 1;
  std::vector<LogLine> log_;
};

}  // namespace horovod
