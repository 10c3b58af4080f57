// A coordinator at a clock that moves only when told, and short words for what ranks say to it.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "core/coordinator.h"

namespace horovod::lab {

using namespace std::chrono_literals;
using Ranks = std::vector<int32_t>;

inline Request call(const std::string& name, OpKind kind = OpKind::Allreduce, Shape shape = {4}) {
  Request r;
  r.kind = kind;
  r.name = name;
  if (info(kind).moves_data) r.tensors = {{DType::Float32, std::move(shape)}};
  return r;
}

inline Request in_set(Request r, uint32_t set) {
  r.set = set;
  return r;
}

inline Request join_call() { return call("join", OpKind::Join); }

inline Request add_call(Ranks ranks, int number = 0) {
  Request r = call("add." + std::to_string(number), OpKind::AddSet);
  r.ranks = std::move(ranks);
  r.unnamed = true;
  return r;
}

inline Request remove_call(int32_t uid, int number = 0) {
  Request r = call("remove." + std::to_string(number), OpKind::RemoveSet);
  r.root = uid;
  r.unnamed = true;
  return r;
}

// A coordinator of `size` ranks at a clock that only moves when told.
class Lab {
 public:
  explicit Lab(int32_t size, const std::function<void(CoordinatorOptions&)>& change = {})
      : size_(size), coordinator_(options(size, change)) {}

  void say(int32_t rank, Item item) { coordinator_.receive(rank, std::move(item), now_); }
  void announce(int32_t rank, Request request, bool blocked = true, std::string payload = {}) {
    say(rank, Announce{std::move(request), blocked, 0, std::move(payload)});
  }
  void all_announce(const Request& request, bool blocked = true) {
    for (int32_t rank = 0; rank < size_; ++rank) announce(rank, request, blocked);
  }
  void wait(Duration duration) { now_ += duration; }

  std::vector<Outgoing> decide() {
    std::vector<Outgoing> out;
    coordinator_.decide(now_, out, log);
    CHECK(coordinator_.next_deadline() > now_);
    return out;
  }
  std::vector<Entry> entries() {
    std::vector<Entry> out;
    for (Outgoing& outgoing : decide()) {
      out.push_back(std::get<Entry>(std::move(outgoing.decision)));
      CHECK(outgoing.to == out.back().contributors);
    }
    return out;
  }
  Entry entry() {
    std::vector<Entry> all = entries();
    CHECK_EQ(all.size(), 1u);
    return std::move(all.front());
  }
  Entry good_entry() {
    Entry one = entry();
    CHECK_EQ(one.status.text, "");
    CHECK(one.status.ok());
    return one;
  }
  Status error() {
    Entry one = entry();
    CHECK(!one.status.ok());
    CHECK_EQ(one.items.size(), 1u);
    CHECK_EQ(one.items[0].id, 0u);
    return one.status;
  }
  void silent() { CHECK_EQ(decide().size(), 0u); }
  void done(const Entry& entry) { say(entry.contributors.front(), Done{entry.seq}); }
  std::optional<Duration> deadline() const {
    const TimePoint next = coordinator_.next_deadline();
    if (next == TimePoint::max()) return std::nullopt;
    return next - now_;
  }
  // Lets all ranks run `request` and returns its entry.
  Entry run(const Request& request) {
    all_announce(request);
    Entry one = good_entry();
    done(one);
    return one;
  }
  uint32_t add_set(const Ranks& ranks) {
    all_announce(add_call(ranks, sets_++));
    return static_cast<uint32_t>(good_entry().value);
  }

  Coordinator& coordinator() { return coordinator_; }
  std::vector<LogLine> log;

 private:
  static CoordinatorOptions options(int32_t size,
                                    const std::function<void(CoordinatorOptions&)>& change) {
    CoordinatorOptions o;
    o.crossed = o.answers = {};  // so that deadlines are those of the law at hand
    for (int32_t rank = 0; rank < size; ++rank) {
      o.names.push_back("host" + std::to_string(rank / 2) + ", pid " + std::to_string(100 + rank));
    }
    if (change) change(o);
    return o;
  }

  int32_t size_;
  int sets_ = 100;
  TimePoint now_ = TimePoint(1000h);
  Coordinator coordinator_;
};

inline bool contains(std::string_view text, std::string_view part) {
  if (text.find(part) != std::string_view::npos) return true;
  std::cerr << "\"" << text << "\" lacks \"" << part << "\"\n";
  return false;
}

inline std::vector<std::string> names(const Entry& entry) {
  std::vector<std::string> out;
  for (const EntryItem& item : entry.items) out.push_back(item.name);
  return out;
}

using Names = std::vector<std::string>;

}  // namespace horovod::lab
