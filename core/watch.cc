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

Ranks waiting_ranks(const Scene& scene, const Call& call) {
  const ProcessSet& set = scene.sets.at(call.set);
  Ranks ranks;
  for (int32_t rank : set.members) {
    if (set.voice(call, rank).said == Voice::Said::Announced) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<std::string> describe_calls(const std::vector<const Call*>& calls) {
  std::vector<std::string> parts;
  for (const Call* call : calls) {
    parts.push_back(parts.size() < kMostNames ? describe_call(call->kind, call->name) : "");
  }
  return parts;
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

const char* hint_for(const Call& call) {
  if (!info(call.kind).moves_data || !unnamed(call)) return "";
  return ". Calls without a name match by their number: some rank made more of them than others, "
         "or fewer";
}

int32_t first_caller(const Scene& scene, const Call& call) {
  const Ranks waiting = waiting_ranks(scene, call);
  return waiting.empty() ? -1 : waiting.front();
}

// The open calls of a rank.
std::vector<const Call*> calls_of(const Scene& scene, int32_t rank) {
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
  return own;
}

// One of those that wait for the call, if there is any, and those it waits for.
void ask_about(const Call& call, int32_t caller, const Ranks& missing, Inquiry& inquiry) {
  if (caller >= 0) inquiry.ask(caller, call.set, call.name);
  for (size_t i = 0; i < std::min(missing.size(), kMostRanks); ++i) {
    inquiry.ask(missing[i], call.set, call.name);
  }
}

// " (rank 0 at train.py:12)" if that is known.
std::string describe_site(int32_t rank, const std::string& name, const Inquiry& inquiry) {
  const std::string site = inquiry.where(rank, name);
  return site.empty() ? "" : " (rank " + std::to_string(rank) + site + ")";
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
  return out.append(" of the set of ").append(describe_ranks(scene.sets.at(call.set).members));
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
  if (!stall.told) tell(stall, now);
  std::string text = "stall resolved after " + describe_seconds(seconds(now - stall.since)) + ": " +
                     stall.calls[0];
  if (stall.calls.size() > 1) {
    text += " and " + std::to_string(stall.calls.size() - 1) + " more";
  }
  log_.push_back({20, std::move(text)});
  stalls_.erase(it);
}

void Watch::located(int32_t rank, const Located& answer) {
  for (auto& [number, stall] : stalls_) stall.inquiry.hear(rank, answer);
  if (verdict_) verdict_->inquiry.hear(rank, answer);
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
    if (!fresh.empty()) open_stalls(scene, fresh, now);
  }
  for (auto& [number, stall] : stalls_) {
    if (!stall.told && stall.inquiry.over(now)) tell(stall, now);
  }
  std::optional<Verdict> verdict = judge(scene, now);
  if (!verdict) {
    verdict_.reset();
    return std::nullopt;
  }
  if (!verdict_ || verdict_->set != verdict->set || verdict_->name != verdict->name) {
    verdict->inquiry.send(next_question_, now, options_.answers, questions_);
    verdict_ = std::move(verdict);
  } else {
    verdict_->call = verdict->call;
  }
  if (!verdict_->inquiry.over(now)) return std::nullopt;
  return verdict_->call != nullptr ? stalled(scene, *verdict_, now)
                                   : deadlocked(scene, verdict_->inquiry);
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
  for (const auto& [number, stall] : stalls_) {
    if (!stall.told) next = std::min(next, stall.inquiry.until());
  }
  if (verdict_) return std::min(next, verdict_->inquiry.until());
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

void Watch::take_questions(std::vector<Outgoing>& out) {
  for (Outgoing& question : questions_) out.push_back(std::move(question));
  questions_.clear();
}

// One for each group of ranks that is missing.
void Watch::open_stalls(const Scene& scene, const std::vector<Call*>& calls, TimePoint now) {
  std::map<Ranks, std::vector<Call*>> groups;
  std::vector<Ranks> order;
  for (Call* call : calls) {
    Ranks missing = missing_ranks(scene, *call);
    auto& group = groups[missing];
    if (group.empty()) order.push_back(std::move(missing));
    group.push_back(call);
  }
  for (Ranks& missing : order) {
    const std::vector<Call*>& group = groups[missing];
    const Call& first = *group.front();
    const uint64_t number = next_stall_++;
    Stall& stall = stalls_[number];
    stall.since = first.since;
    stall.open = group.size();
    stall.calls = describe_calls({group.begin(), group.end()});
    stall.first = first.name;
    stall.caller = first_caller(scene, first);
    stall.hint = hint_for(first);
    ask_about(first, stall.caller, missing, stall.inquiry);
    for (Call* call : group) {
      call->stall = number;
      const Ranks ranks = waiting_ranks(scene, *call);
      stall.waiting.insert(stall.waiting.end(), ranks.begin(), ranks.end());
    }
    std::sort(stall.waiting.begin(), stall.waiting.end());
    stall.waiting.erase(std::unique(stall.waiting.begin(), stall.waiting.end()),
                        stall.waiting.end());
    stall.missing = std::move(missing);
    stall.inquiry.send(next_question_, now, options_.answers, questions_);
  }
}

void Watch::tell(Stall& stall, TimePoint now) {
  stall.told = true;
  const Ranks& waiting = stall.waiting;
  std::string who = "calls have";
  if (!waiting.empty()) who = describe_ranks(waiting) + (waiting.size() == 1 ? " has" : " have");
  std::vector<std::string> calls = stall.calls;
  calls[0] += describe_site(stall.caller, stall.first, stall.inquiry);
  log_.push_back({30, "stall: " + who + " waited for " +
                          describe_seconds(seconds(now - stall.since)) +
                          ". Missing: " + describe_missing(stall.missing, stall.inquiry, now) +
                          ". Waiting calls: " + join_some(calls, kMostNames, ", ") + stall.hint});
}

std::string Watch::describe_missing(const Ranks& missing, const Inquiry& inquiry,
                                    TimePoint now) const {
  std::vector<std::string> parts;
  for (const int32_t rank : missing) {
    std::string& text = parts.emplace_back();
    if (parts.size() > kMostRanks) continue;
    const LastCall& last = last_[static_cast<size_t>(rank)];
    text = describe_rank(rank, options_.names) + ", which ";
    if (last.any) {
      text += "last announced " + describe_call(last.kind, last.name) +
              inquiry.where(rank, last.name) + " " + describe_seconds(seconds(now - last.when)) +
              " ago";
    } else {
      text += "hasn't announced anything yet";
    }
    if (inquiry.silent(rank)) text += " and doesn't answer now";
  }
  return join_some(parts, kMostRanks, "; ");
}

// What is due to end the epoch, with its questions.
std::optional<Watch::Verdict> Watch::judge(const Scene& scene, TimePoint now) const {
  if (shutdown_ > Duration{}) {
    for (const Call& call : scene.waiting) {
      if (now - call.since < shutdown_) break;
      if (call.kind == OpKind::Join) continue;  // waiting for more data is what join() is for
      Verdict verdict{&call, call.name, call.set, {}};
      ask_about(call, first_caller(scene, call), missing_ranks(scene, call), verdict.inquiry);
      return verdict;
    }
  }
  if (!scene.all_blocked || options_.deadlock == Duration{} ||
      now - last_arrival_ < options_.deadlock) {
    return std::nullopt;
  }
  Verdict verdict{nullptr, {}, 0, {}};
  const size_t asked = std::min(scene.left.size(), kMostRanks);
  for (size_t rank = 0; rank < asked; ++rank) {
    const std::vector<const Call*> own = calls_of(scene, static_cast<int32_t>(rank));
    if (scene.left[rank] || own.empty()) continue;
    verdict.inquiry.ask(static_cast<int32_t>(rank), own[0]->set, own[0]->name);
  }
  return verdict;
}

Status Watch::stalled(const Scene& scene, const Verdict& verdict, TimePoint now) const {
  const Call& call = *verdict.call;
  const Ranks missing = missing_ranks(scene, call);
  return {ErrorKind::Timeout,
          describe_call(call.kind, call.name) +
              describe_site(first_caller(scene, call), call.name, verdict.inquiry) +
              " has waited for " + describe_seconds(seconds(now - call.since)) +
              ", longer than the stall shutdown time (" + describe_seconds(seconds(shutdown_)) +
              "). Missing: " + describe_missing(missing, verdict.inquiry, now) + hint_for(call),
          missing.size() == 1 ? missing.front() : -1};
}

Status Watch::deadlocked(const Scene& scene, const Inquiry& inquiry) const {
  std::vector<std::string> parts;
  for (size_t r = 0; r < scene.left.size(); ++r) {
    if (scene.left[r]) continue;
    std::string& text = parts.emplace_back();
    if (parts.size() > kMostRanks) continue;
    const auto rank = static_cast<int32_t>(r);
    const std::vector<const Call*> own = calls_of(scene, rank);
    std::vector<std::string> calls = describe_calls(own);
    if (!own.empty()) calls[0] += inquiry.where(rank, own[0]->name);
    text = describe_rank(rank, options_.names) + " waits for " + join_some(calls, kMostNames, ", ");
    if (inquiry.silent(rank)) text += " and doesn't answer now";
  }
  return {ErrorKind::Timeout,
          "deadlock: every rank waits, no call can run, and nothing has happened for " +
              describe_seconds(seconds(options_.deadlock)) + ": " +
              join_some(parts, kMostRanks, "; "),
          -1};
}

}  // namespace horovod
