// L4: the coordinator's memory: process sets, and the calls that some rank has announced and that
// have no entry yet. Must not decide anything.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "call_map.h"
#include "coordinator.h"
#include "types.h"
#include "wire.h"

namespace horovod {

// What one member has said about one call.
struct Voice {
  enum class Said : uint8_t { Nothing, Announced, Rejected };

  Said said = Said::Nothing;
  bool blocked = false;  // a caller waits; Announced only
  uint64_t id = 0;       // under which it was announced; 0: in full
  std::shared_ptr<const Request> request;
  std::string payload;  // that came with it
};

// What a rank says about the next round of a name while this one is still open without it.
struct Held {
  int32_t rank = 0;
  std::shared_ptr<const Request> request;  // nullptr: rejected again
  bool blocked = false;
  Reject rejection;
  std::string payload;
};

// One name of one set, from its first announcement or rejection to its entry.
struct Call {
  uint32_t set = 0;
  OpKind kind = OpKind::Allreduce;  // of whoever spoke first
  std::string name;
  TimePoint since;            // first announcement
  std::vector<Voice> voices;  // by position in the set
  size_t missing = 0;  // members that said nothing and haven't joined (Join: that said nothing)
  size_t announced = 0;
  std::vector<std::pair<int32_t, std::string>> rejected;
  std::vector<Held> later;
  uint64_t stall = 0;  // number of the warning that reported it; 0: none

  // Once it is ready:
  enum class Place : uint8_t { Waiting, Alone, Fusing };
  Place place = Place::Waiting;
  uint64_t order = 0;  // by readiness
  TimePoint ready_since;
  uint64_t bytes = 0;
  uint64_t payload_bytes = 0;  // of each contributor; 0: not every one sent its payload
  std::shared_ptr<const Request> request;
  bool everyone = false;              // contributors are all members
  std::vector<int32_t> contributors;  // global ranks, ascending
};

using CallList = std::list<Call>;

struct ProcessSet {
  uint32_t uid = 0;
  std::vector<int32_t> members;   // global ranks, ascending
  std::vector<int32_t> position;  // by global rank; -1: not a member
  int32_t left = -1;              // the member that left first
  size_t blocked_members = 0;     // members with a blocked call anywhere
  size_t in_flight = 0;
  CallList alone;   // ready, and nothing to wait for
  CallList fusing;  // ready, better with company
  uint64_t fusing_bytes = 0;

  bool has(int32_t rank) const {
    return rank >= 0 && static_cast<size_t>(rank) < position.size() &&
           position[static_cast<size_t>(rank)] >= 0;
  }
  Voice& voice(Call& call, int32_t rank) const {
    return call.voices[static_cast<size_t>(position[static_cast<size_t>(rank)])];
  }
  const Voice& voice(const Call& call, int32_t rank) const {
    return call.voices[static_cast<size_t>(position[static_cast<size_t>(rank)])];
  }
};

// Finds calls by name, and keeps the memory of finished ones for the next: in a steady state
// nothing is allocated.
class Calls {
 public:
  // Not ready yet, the oldest first.
  CallList& waiting() { return waiting_; }
  const CallList& waiting() const { return waiting_; }

  Call* find(uint32_t set, std::string_view name) {
    const CallList::iterator* place = by_name_.find({set, name});
    return place == nullptr ? nullptr : &**place;
  }

  Call& start(const ProcessSet& set, OpKind kind, const std::string& name, TimePoint now) {
    if (spare_.empty()) spare_.emplace_back();
    waiting_.splice(waiting_.end(), spare_, spare_.begin());
    Call& call = waiting_.back();
    call.set = set.uid;
    call.kind = kind;
    call.name = name;
    call.since = now;
    call.voices.resize(set.members.size());
    by_name_.add({set.uid, call.name}, std::prev(waiting_.end()));
    return call;
  }

  // Moves a call that became ready to the end of a list of its set.
  void move(Call& call, CallList& to) {
    to.splice(to.end(), waiting_, *by_name_.find({call.set, call.name}));
  }

  // Forgets a call; `in` is the list it is in.
  void finish(Call& call, CallList& in) {
    spare_.splice(spare_.begin(), in, *by_name_.take({call.set, call.name}));
    call.voices.clear();
    call.announced = 0;
    call.rejected.clear();
    call.later.clear();
    call.stall = 0;
    call.place = Call::Place::Waiting;
    call.request.reset();
    call.contributors.clear();
  }

 private:
  CallList waiting_;
  CallList spare_;
  CallMap<CallList::iterator> by_name_;
};

}  // namespace horovod
