// L4: what one rank has told the coordinator and not heard back of: it abbreviates calls, repeats
// them when asked, and finds them again when their entry comes. Must not do I/O, own a thread or
// read a clock. The engine and the control-plane simulation share it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cache.h"
#include "call_map.h"
#include "types.h"
#include "wire.h"

namespace horovod {

// `T` is what the owner keeps of a call; it must keep the Request that it was announced with.
template <typename T>
class Announcer {
 public:
  explicit Announcer(size_t cache_capacity) : cache_(cache_capacity) {}

  // The item to send for a call whose name isn't open in its set.
  Item announce(T call, const Request& request, bool blocked, std::string payload = {}) {
    const uint64_t id = cache_.find(request);
    open_.add({request.set, request.name}, {std::move(call), &request, id, blocked});
    if (id != 0) return AnnounceCached{id, blocked, std::move(payload)};
    return Announce{request, blocked, 0, std::move(payload)};
  }

  // A caller waits for a call that was announced without saying so; nothing if its entry has come.
  std::optional<Item> block(uint32_t set, const std::string& name) {
    Open* open = open_.find({set, name});
    if (open == nullptr || std::exchange(open->blocked, true)) return std::nullopt;
    return Blocked{set, name};
  }

  // The coordinator forgot an id that was announced: the call in full, but without its payload, so
  // that its data goes the usual way.
  Item again(uint64_t id) {
    const Request* request = cache_.request(id);
    Open* open = request == nullptr ? nullptr : open_.find({request->set, request->name});
    if (open == nullptr || open->id != id) {
      throw Error(
          ErrorKind::InvalidArgument,
          "rank 0 asks again for a call that this rank never made: id " + std::to_string(id));
    }
    cache_.forget(id);
    open->id = 0;
    return Announce{*open->request, open->blocked, id, {}};
  }

  // What the owner keeps of an open call; nullptr if none of this name is open.
  const T* find_call(uint32_t set, const std::string& name) {
    const Open* open = open_.find({set, name});
    return open == nullptr ? nullptr : &open->call;
  }

  // The calls of an entry, in its order. They are open no more.
  std::vector<T> take(const Entry& entry) {
    std::vector<T> calls;
    calls.reserve(entry.items.size());
    for (const EntryItem& item : entry.items) {
      const std::string* name = item.name.empty() ? cache_.name(item.id) : &item.name;
      std::optional<Open> open;
      if (name != nullptr) open = open_.take({entry.set, *name});
      if (!open) {
        throw Error(ErrorKind::InvalidArgument,
                    "rank 0 scheduled a call that this rank never made: " +
                        (name == nullptr ? "id " + std::to_string(item.id) : *name));
      }
      if (entry.status.ok()) {
        cache_.learn(item.id, *open->request);
      } else {
        cache_.forget(open->id);
      }
      calls.push_back(std::move(open->call));
    }
    return calls;
  }

  // The process set is gone, after all its calls.
  void forget_set(uint32_t set) {
    open_.erase_if([&](const CallKey& key, const Open&) { return key.set == set; });
    cache_.forget_set(set);
  }

  // Everything that is open; it is open no more.
  std::vector<T> take_all() {
    std::vector<T> calls;
    open_.for_each([&](const CallKey&, const Open& open) { calls.push_back(open.call); });
    open_.clear();
    return calls;
  }

 private:
  struct Open {
    T call = {};
    const Request* request = nullptr;
    uint64_t id = 0;  // 0: announced in full
    bool blocked = false;
  };

  NameCache cache_;
  CallMap<Open> open_;
};

}  // namespace horovod
