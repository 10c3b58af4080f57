// L4: the clocks of waiting calls, and what is said when they run out.
#include "watch.h"

#include <algorithm>

#include "describe.h"

namespace horovod {
namespace {

constexpr size_t kMostNames = 6;    // calls listed in a line
constexpr size_t kMostRanks = 16;   // ranks described in a line
constexpr size_t kMostPaired = 64;  // calls looked at for crossings

double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

using Ranks = std::vector<int32_t>;

// Members whose call the others wait for.
Ranks missing_ranks(const Scene& scene, const Call& call) {
  const ProcessSet& set = scene.sets.at(call.set);
  Ranks ranks;
  for (int32_t rank : set.members) {
    const bool excused = call.kind != OpKind::Join && scene.joined[static_cast<size_t>(rank)];
    if (set.voice(call, rank).said == Voice::Said::Nothing && !excused) ranks.push_back(rank);
  }
  return ranks;
}

void add_waiting_ranks(const Scene& scene, const Call& call, Ranks& ranks) {
  const ProcessSet& set = scene.sets.at(call.set);
  for (int32_t rank : set.members) {
    if (set.voice(call, rank).said == Voice::Said::Announced) ranks.push_back(rank);
  }
}

std::string name_calls(const std::vector<const Call*>& calls, size_t limit) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < calls.size(); ++i) {
    parts.push_back(i < limit ? describe_call(calls[i]->kind, calls[i]->name) : std::string());
  }
  return join_some(parts, limit, ", ");
}

// Ranks with a caller that waits for this call.
Ranks blocked_ranks(const Scene& scene, const Call& call) {
  const ProcessSet& set = scene.sets.at(call.set);
  Ranks ranks;
  for (int32_t rank : set.members) {
    if (set.voice(call, rank).blocked) ranks.push_back(rank);
  }
  return ranks;
}

bool unnamed(const Call& call) {
  return std::any_of(call.voices.begin(), call.voices.end(), [](const Voice& voice) {
    return voice.request != nullptr && voice.request->unnamed;
  });
}

// Whether a program could mean the same call by both: the same name, or none.
bool alike(const Call& a, const Call& b) {
  if (unnamed(a) != unnamed(b)) return false;
  return unnamed(a) || bare_name(a.kind, a.name) == bare_name(b.kind, b.name);
}

bool waits_in_vain(const Scene& scene, const Ranks& ranks, const Call& call) {
  const ProcessSet& set = scene.sets.at(call.set);
  return std::any_of(ranks.begin(), ranks.end(), [&](int32_t rank) {
    return set.has(rank) && set.voice(call, rank).said == Voice::Said::Nothing;
  });
}

std::string describe_place(const Scene& scene, const Call& call, const Ranks& ranks) {
  std::string out = describe_ranks(ranks);
  out.append(" called ").append(describe_call(call.kind, call.name));
  if (call.set == 0) return out += " of all ranks";
  return out.append(" of process set ")
      .append(std::to_string(call.set))
      .append(" (")
      .append(describe_ranks(scene.sets.at(call.set).members))
      .append(")");
}

}  // namespace

Watch::Watch(const CoordinatorOptions& options)
    : options_(options), shutdown_(options.stall_shutdown), last_(options.names.size()) {
  if (shutdown_ > Duration{} && shutdown_ < options.stall_warning) {
    shutdown_ = Duration{};
    log_.push_back({30, "the stall shutdown time (" +
                            describe_seconds(seconds(options.stall_shutdown)) +
                            ") is shorter than the stall warning time (" +
                            describe_seconds(seconds(options.stall_warning)) + ") and is ignored"});
  }
}

void Watch::heard(int32_t rank, OpKind kind, const std::string& name, TimePoint now) {
  LastCall& last = last_[static_cast<size_t>(rank)];
  last.kind = kind;
  last.name = name;
  last.when = now;
  last.any = true;
}

void Watch::resolved(Call& call, TimePoint now) {
  if (call.stall == 0) return;
  const auto it = stalls_.find(call.stall);
  call.stall = 0;
  Stall& stall = it->second;
  if (--stall.open > 0) return;
  std::string text =
      "stall resolved after " + describe_seconds(seconds(now - stall.since)) + ": " + stall.first;
  if (stall.calls > 1) text += " and " + std::to_string(stall.calls - 1) + " more";
  log_.push_back({20, std::move(text)});
  stalls_.erase(it);
}

std::optional<Status> Watch::look(const Scene& scene, CallList& waiting, TimePoint now) {
  if (options_.stall_warning > Duration{}) {
    // Once the oldest call is due, everything that waits half as long is part of the same report: a
    // rank that is late is late for many calls.
    std::vector<Call*> fresh;
    for (Call& call : waiting) {
      if (call.stall != 0) continue;
      const Duration age = now - call.since;
      if (age < (fresh.empty() ? options_.stall_warning : options_.stall_warning / 2)) break;
      fresh.push_back(&call);
    }
    if (!fresh.empty()) warn(scene, fresh, now);
  }
  if (shutdown_ > Duration{}) {
    for (const Call& call : waiting) {
      if (now - call.since < shutdown_) break;
      // Waiting in join() for ranks with more data is what join() is for.
      if (call.kind != OpKind::Join) return stalled(scene, call, now);
    }
  }
  if (scene.all_blocked && options_.deadlock > Duration{} &&
      now - last_arrival_ >= options_.deadlock) {
    return deadlocked(scene);
  }
  return std::nullopt;
}

std::optional<Crossing> Watch::look_for_crossing(const Scene& scene, CallList& waiting,
                                                 TimePoint now) {
  if (!scene.all_blocked || options_.crossed == Duration{} || looked_at_ == last_arrival_ ||
      now - last_arrival_ < options_.crossed) {
    return std::nullopt;
  }
  std::vector<std::pair<Call*, Ranks>> blocked;
  for (Call& call : waiting) {
    if (blocked.size() == kMostPaired) break;
    if (!info(call.kind).moves_data && call.kind != OpKind::Barrier) continue;
    if (Ranks ranks = blocked_ranks(scene, call); !ranks.empty()) {
      blocked.emplace_back(&call, std::move(ranks));
    }
  }
  for (size_t i = 0; i < blocked.size(); ++i) {
    for (size_t j = i + 1; j < blocked.size(); ++j) {
      const auto& [a, a_ranks] = blocked[i];
      const auto& [b, b_ranks] = blocked[j];
      if (alike(*a, *b) && waits_in_vain(scene, a_ranks, *b) && waits_in_vain(scene, b_ranks, *a)) {
        return Crossing{a, b,
                        "ranks made different calls: " + describe_place(scene, *a, a_ranks) + ", " +
                            describe_place(scene, *b, b_ranks)};
      }
    }
  }
  looked_at_ = last_arrival_;
  return std::nullopt;
}

TimePoint Watch::next_deadline(const Scene& scene) const {
  TimePoint next = TimePoint::max();
  if (scene.all_blocked && options_.crossed > Duration{} && looked_at_ != last_arrival_) {
    next = std::min(next, last_arrival_ + options_.crossed);
  }
  if (options_.stall_warning > Duration{}) {
    const auto fresh = std::find_if(scene.waiting.begin(), scene.waiting.end(),
                                    [](const Call& call) { return call.stall == 0; });
    if (fresh != scene.waiting.end()) next = std::min(next, fresh->since + options_.stall_warning);
  }
  if (shutdown_ > Duration{}) {
    const auto call =
        std::find_if(scene.waiting.begin(), scene.waiting.end(),
                     [](const Call& waiting) { return waiting.kind != OpKind::Join; });
    if (call != scene.waiting.end()) next = std::min(next, call->since + shutdown_);
  }
  if (scene.all_blocked && options_.deadlock > Duration{}) {
    next = std::min(next, last_arrival_ + options_.deadlock);
  }
  return next;
}

void Watch::take_log(std::vector<LogLine>& log) {
  for (LogLine& line : log_) log.push_back(std::move(line));
  log_.clear();
}

// One line for each group of ranks that is missing.
void Watch::warn(const Scene& scene, const std::vector<Call*>& calls, TimePoint now) {
  std::map<Ranks, std::vector<Call*>> groups;
  std::vector<Ranks> order;
  for (Call* call : calls) {
    Ranks missing = missing_ranks(scene, *call);
    auto& group = groups[missing];
    if (group.empty()) order.push_back(std::move(missing));
    group.push_back(call);
  }
  for (const Ranks& missing : order) {
    const std::vector<Call*>& group = groups[missing];
    const uint64_t number = next_stall_++;
    Stall& stall = stalls_[number];
    stall.since = group.front()->since;
    stall.open = stall.calls = group.size();
    stall.first = describe_call(group.front()->kind, group.front()->name);
    Ranks waiting;
    for (Call* call : group) {
      call->stall = number;
      add_waiting_ranks(scene, *call, waiting);
    }
    std::sort(waiting.begin(), waiting.end());
    waiting.erase(std::unique(waiting.begin(), waiting.end()), waiting.end());

    std::vector<std::string> late;
    for (size_t i = 0; i < missing.size(); ++i) {
      late.push_back(i < kMostRanks ? describe_missing(missing[i], now) : std::string());
    }
    log_.push_back(
        {30, "stall: " +
                 (waiting.empty()
                      ? "calls have"
                      : describe_ranks(waiting) + (waiting.size() == 1 ? " has" : " have")) +
                 " waited for " + describe_seconds(seconds(now - stall.since)) +
                 ". Missing: " + join_some(late, kMostRanks, "; ") +
                 ". Waiting calls: " + name_calls({group.begin(), group.end()}, kMostNames)});
  }
}

std::string Watch::describe_missing(int32_t rank, TimePoint now) const {
  const LastCall& last = last_[static_cast<size_t>(rank)];
  const std::string who = describe_rank(rank, options_.names);
  if (!last.any) return who + ", which hasn't announced anything yet";
  return who + ", which last announced " + describe_call(last.kind, last.name) + " " +
         describe_seconds(seconds(now - last.when)) + " ago";
}

Status Watch::stalled(const Scene& scene, const Call& call, TimePoint now) const {
  const Ranks missing = missing_ranks(scene, call);
  std::vector<std::string> late;
  for (size_t i = 0; i < missing.size(); ++i) {
    late.push_back(i < kMostRanks ? describe_missing(missing[i], now) : std::string());
  }
  return {ErrorKind::Timeout,
          describe_call(call.kind, call.name) + " has waited for " +
              describe_seconds(seconds(now - call.since)) +
              ", longer than the stall shutdown time (" + describe_seconds(seconds(shutdown_)) +
              "). Missing: " + join_some(late, kMostRanks, "; "),
          missing.size() == 1 ? missing.front() : -1};
}

Status Watch::deadlocked(const Scene& scene) const {
  std::vector<std::string> parts;
  for (size_t r = 0; r < scene.left.size(); ++r) {
    if (scene.left[r]) continue;
    const auto rank = static_cast<int32_t>(r);
    std::vector<const Call*> own;
    for (const Call& call : scene.waiting) {
      const ProcessSet& set = scene.sets.at(call.set);
      const bool held = std::any_of(call.later.begin(), call.later.end(), [&](const Held& h) {
        return h.rank == rank && h.request != nullptr;
      });
      if (set.has(rank) && (held || set.voice(call, rank).said == Voice::Said::Announced)) {
        own.push_back(&call);
      }
    }
    parts.push_back(parts.size() < kMostRanks ? describe_rank(rank, options_.names) +
                                                    " waits for " + name_calls(own, kMostNames)
                                              : std::string());
  }
  return {ErrorKind::Timeout,
          "deadlock: every rank waits, no call can run, and nothing has happened for " +
              describe_seconds(seconds(options_.deadlock)) + ": " +
              join_some(parts, kMostRanks, "; "),
          -1};
}

}  // namespace horovod
