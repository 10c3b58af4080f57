// L4: which calls have a number instead of a name: one least-recently-used table, held by every
// rank and by the coordinator. Must not know messages, clocks or threads.
//
// Ids come with the entries of the global order and are never reused. Every table is ordered by the
// entries its owner saw, so a rank's table and the coordinator's may differ; that costs a repeated
// announcement and is never wrong: an id the coordinator no longer has is answered with Resend, and
// an entry carries the name unless every contributor announced the id itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "call_map.h"
#include "types.h"
#include "wire.h"

namespace horovod {

class NameCache {
 public:
  explicit NameCache(size_t capacity) : capacity_(capacity) {}

  // The id under which `request` may be announced; 0: announce it in full. The id is then kept,
  // however many others are learned, until learn() or forget(): its entry may come without the
  // name.
  uint64_t find(const Request& request) {
    if (request.unnamed) return 0;
    const auto it = by_name_.find(CallKey{request.set, request.name});
    if (it == by_name_.end()) return 0;
    const Place place = it->second;
    // Same object: the usual case where the coordinator asks.
    if (place->request.get() != &request && !(*place->request == request)) return 0;
    if (!place->announced) {
      announced_.splice(announced_.end(), recent_, place);
      place->announced = true;
    }
    return place->id;
  }

  // An entry gave, or repeated, this id. Replaces what the name had before.
  void learn(uint64_t id, std::shared_ptr<const Request> request) {
    if (capacity_ == 0 || id == 0 || request->unnamed) return;
    if (learn_again(id)) return;
    const CallKey key{request->set, request->name};
    if (const auto it = by_name_.find(key); it != by_name_.end()) erase(it->second);
    recent_.push_front(Node{id, false, std::move(request)});
    by_id_.emplace(id, recent_.begin());
    by_name_.emplace(CallKey{recent_.front().request->set, recent_.front().request->name},
                     recent_.begin());
    trim();
  }
  void learn(uint64_t id, const Request& request) {
    if (capacity_ == 0 || id == 0 || request.unnamed) return;
    if (!learn_again(id)) learn(id, std::make_shared<const Request>(request));
  }

  // What the id abbreviates; nullptr if it isn't here.
  const std::shared_ptr<const Request>& request_of(uint64_t id) const {
    static const std::shared_ptr<const Request> kNone;
    const auto it = by_id_.find(id);
    return it == by_id_.end() ? kNone : it->second->request;
  }
  const Request* request(uint64_t id) const { return request_of(id).get(); }
  const std::string* name(uint64_t id) const {
    const Request* found = request(id);
    return found ? &found->name : nullptr;
  }

  // The coordinator no longer knows this id, or the call it was announced for failed.
  void forget(uint64_t id) {
    if (const auto it = by_id_.find(id); it != by_id_.end()) erase(it->second);
  }

  // The process set is gone.
  void forget_set(uint32_t set) {
    for (std::list<Node>* nodes : {&recent_, &announced_}) {
      for (auto it = nodes->begin(); it != nodes->end();) {
        const Place place = it++;
        if (place->request->set == set) erase(place);
      }
    }
  }

  size_t size() const { return by_id_.size(); }

 private:
  struct Node {
    uint64_t id;
    bool announced;  // in announced_
    std::shared_ptr<const Request> request;
  };
  using Place = std::list<Node>::iterator;

  // No copy in the usual case: the entry repeated an id.
  bool learn_again(uint64_t id) {
    const auto it = by_id_.find(id);
    if (it == by_id_.end()) return false;
    const Place place = it->second;
    recent_.splice(recent_.begin(), place->announced ? announced_ : recent_, place);
    place->announced = false;
    trim();
    return true;
  }

  void trim() {
    while (by_id_.size() > capacity_ && recent_.size() > 1) erase(std::prev(recent_.end()));
  }

  void erase(Place place) {
    by_id_.erase(place->id);
    by_name_.erase(CallKey{place->request->set, place->request->name});
    (place->announced ? announced_ : recent_).erase(place);
  }

  size_t capacity_;
  std::list<Node> recent_;     // by last entry, the latest first
  std::list<Node> announced_;  // found, and not yet learned again: not evicted
  std::unordered_map<uint64_t, Place> by_id_;
  std::unordered_map<CallKey, Place, CallKeyHash> by_name_;  // the keys view the nodes' requests
};

}  // namespace horovod
