// L4: what one rank has told the coordinator and not heard back of: it abbreviates calls, repeats
// them when asked, and finds them again when their entry comes. Must not do I/O, own a thread or
// read a clock. The engine and the control-plane simulation share it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache.h"
#include "types.h"
#include "wire.h"

namespace horovod {

// `T` is what the owner keeps of a call; it must keep the Request that it was announced with.
template <typename T>
class Announcer {
 public:
  explicit Announcer(size_t cache_capacity) : cache_(cache_capacity) {}

  // The item to send for a call whose name isn't open in its set.
  Item announce(T call, const Request& request, bool blocked) {
    const uint64_t id = cache_.find(request);
    open_[request.set].insert_or_assign(request.name, Open{std::move(call), &request, id, blocked});
    if (id != 0) return AnnounceCached{id, blocked};
    return Announce{request, blocked, 0};
  }

  // A caller waits for a call that was announced without saying so; nothing if its entry has come.
  std::optional<Item> block(uint32_t set, const std::string& name) {
    Open* open = find(set, name);
    if (open == nullptr || std::exchange(open->blocked, true)) return std::nullopt;
    return Blocked{set, name};
  }

  // The coordinator forgot an id that was announced: the call in full.
  Item again(uint64_t id) {
    const Request* request = cache_.request(id);
    Open* open = request == nullptr ? nullptr : find(request->set, request->name);
    if (open == nullptr || open->id != id) {
      throw Error(
          ErrorKind::InvalidArgument,
          "rank 0 asks again for a call that this rank never made: id " + std::to_string(id));
    }
    cache_.forget(id);
    open->id = 0;
    return Announce{*open->request, open->blocked, id};
  }

  // What the owner keeps of an open call; nullptr if none of this name is open.
  const T* find_call(uint32_t set, const std::string& name) {
    const Open* open = find(set, name);
    return open == nullptr ? nullptr : &open->call;
  }

  // The calls of an entry, in its order. They are open no more.
  std::vector<T> take(const Entry& entry) {
    std::vector<T> calls;
    calls.reserve(entry.items.size());
    for (const EntryItem& item : entry.items) {
      const std::string* name = item.name.empty() ? cache_.name(item.id) : &item.name;
      Open* open = name == nullptr ? nullptr : find(entry.set, *name);
      if (open == nullptr) {
        throw Error(ErrorKind::InvalidArgument,
                    "rank 0 scheduled a call that this rank never made: " +
                        (name == nullptr ? "id " + std::to_string(item.id) : *name));
      }
      if (entry.status.ok()) {
        cache_.learn(item.id, *open->request);
      } else {
        cache_.forget(open->id);
      }
      auto& calls_of_set = open_.find(entry.set)->second;
      const auto it = calls_of_set.find(open->request->name);
      calls.push_back(std::move(it->second.call));
      calls_of_set.erase(it);
    }
    return calls;
  }

  // The process set is gone, after all its calls.
  void forget_set(uint32_t set) {
    open_.erase(set);
    cache_.forget_set(set);
  }

  // Everything that is open; it is open no more.
  std::vector<T> take_all() {
    std::vector<T> calls;
    for (auto& [set, by_name] : open_) {
      for (auto& [name, open] : by_name) calls.push_back(std::move(open.call));
    }
    open_.clear();
    return calls;
  }

 private:
  struct Open {
    T call;
    const Request* request;
    uint64_t id;  // 0: announced in full
    bool blocked;
  };

  Open* find(uint32_t set, const std::string& name) {
    const auto calls = open_.find(set);
    if (calls == open_.end()) return nullptr;
    const auto it = calls->second.find(name);
    return it == calls->second.end() ? nullptr : &it->second;
  }

  NameCache cache_;
  std::map<uint32_t, std::unordered_map<std::string, Open>> open_;  // by set and name
};

}  // namespace horovod
