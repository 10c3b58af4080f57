// L4: finds things by the process set and name of a call. Must not know what they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace horovod {

// A name means something within its process set only.
struct CallKey {
  uint32_t set = 0;
  std::string_view name;
  bool operator==(const CallKey&) const = default;
};

struct CallKeyHash {
  size_t operator()(const CallKey& key) const {
    return std::hash<std::string_view>()(key.name) ^ (key.set * 0x9E3779B97F4A7C15ull);
  }
};

// Keys view names that live at least as long as what they lead to. Memory is kept for the next
// entry: in a steady state nothing is allocated.
template <typename T>
class CallMap {
 public:
  T* find(const CallKey& key) {
    const auto it = map_.find(key);
    return it == map_.end() ? nullptr : &it->second;
  }
  bool contains(const CallKey& key) const { return map_.contains(key); }

  // The key must be new.
  T& add(const CallKey& key, T value) {
    if (spare_.empty()) return map_.emplace(key, std::move(value)).first->second;
    auto node = std::move(spare_.back());
    spare_.pop_back();
    node.key() = key;
    node.mapped() = std::move(value);
    return map_.insert(std::move(node)).position->second;
  }

  // What the key leads to, if anything; it does no more.
  std::optional<T> take(const CallKey& key) {
    auto node = map_.extract(key);
    if (node.empty()) return std::nullopt;
    std::optional<T> value = std::exchange(node.mapped(), T{});
    spare_.push_back(std::move(node));
    return value;
  }

  template <typename Visit>
  void for_each(Visit&& visit) const {
    for (const auto& [key, value] : map_) visit(key, value);
  }
  template <typename Predicate>  // (key, value)
  void erase_if(Predicate&& predicate) {
    std::erase_if(map_, [&](const auto& item) { return predicate(item.first, item.second); });
  }
  void clear() { map_.clear(); }

 private:
  using Map = std::unordered_map<CallKey, T, CallKeyHash>;
  Map map_;
  std::vector<typename Map::node_type> spare_;
};

}  // namespace horovod
