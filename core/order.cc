// L4: the coordinator's second half: judges calls that all members have spoken about and makes
// entries of them. Must not know how messages come and go.
#include <algorithm>
#include <optional>
#include <utility>

#include "coordinator_state.h"
#include "describe.h"

namespace horovod {
namespace {

constexpr size_t kMostInFlight = 2;  // entries of one set

// Joined ranks are left out of such calls instead of making them an error. A change of sets needs
// every rank: one that missed it would not know the set.
bool leaves_out_joined(OpKind kind, bool join_all_ops) {
  if (kind == OpKind::AddSet || kind == OpKind::RemoveSet) return false;
  return info(kind).joinable || (join_all_ops && info(kind).moves_data);
}

// Of each contributor; 0 unless every one has sent its payload.
uint64_t payload_bytes_of(const Call& call) {
  std::optional<uint64_t> bytes;
  for (const Voice& voice : call.voices) {
    if (voice.said != Voice::Said::Announced) continue;
    if (voice.payload.size() != bytes.value_or(voice.payload.size())) return 0;
    bytes = voice.payload.size();
  }
  return bytes.value_or(0);
}

}  // namespace

void Coordinator::State::complete(Call& call, TimePoint now) {
  ProcessSet& set = sets.at(call.set);
  if (call.announced == 0) return finish(call, now);  // it failed everywhere: nobody waits
  if (Status status = judge(set, call); !status.ok()) return fail(call, status, now);
  switch (call.request->kind) {
    case OpKind::Join:
      return complete_join(set, call, now);
    case OpKind::AddSet:
      return complete_add(set, call, now);
    case OpKind::RemoveSet:
      return complete_remove(set, call, now);
    default:
      break;
  }
  if (info(call.request->kind).moves_data) return make_ready(set, call, now);
  Entry entry = entry_of(set, call);
  finish(call, now);
  emit(std::move(entry));
}

// Counts the votes: fills in what the call is and who takes part, and says what is wrong with it.
Status Coordinator::State::judge(const ProcessSet& set, Call& call) {
  votes.clear();
  absent.clear();
  bool same_id = true;
  uint64_t id = 0;
  for (size_t i = 0; i < set.members.size(); ++i) {
    const Voice& voice = call.voices[i];
    if (voice.said == Voice::Said::Nothing) absent.push_back(set.members[i]);
    if (voice.said != Voice::Said::Announced) continue;
    if (votes.empty()) {
      id = voice.id;
      call.request = voice.request;
    }
    same_id = same_id && voice.id == id;
    votes.push_back({set.members[i], voice.request.get()});
  }
  call.everyone = votes.size() == set.members.size();
  if (!call.everyone) {
    for (const Vote& vote : votes) call.contributors.push_back(vote.rank);
  }
  if (!call.rejected.empty()) return describe_rejection(call);

  const bool agreed_before = same_id && id != 0;
  if (!agreed_before || !absent.empty()) {
    if (leaves_out_joined(call.request->kind, options.join_all_ops)) absent.clear();
    if (Status status = disagreement(votes, absent); !status.ok()) return status;
  }
  const int32_t root = call.request->root;
  if (!info(call.request->kind).rooted ||
      (set.has(root) && set.voice(call, root).said == Voice::Said::Announced)) {
    return {};
  }
  return {set.has(root) ? ErrorKind::Mismatch : ErrorKind::InvalidArgument,
          describe_call(call.request->kind, call.name) + ": root rank " + std::to_string(root) +
              (set.has(root) ? " has joined" : " is not a member of the process set"),
          root};
}

Status Coordinator::State::describe_rejection(const Call& call) const {
  const auto& [rank, text] = call.rejected.front();
  const size_t others = call.rejected.size() - 1;
  return {ErrorKind::Mismatch,
          describe_call(call.request->kind, call.name) + ": rank " + std::to_string(rank) +
              "'s call failed there: " + text +
              (others > 0 ? " (and those of " + std::to_string(others) + " other ranks)" : ""),
          others > 0 ? -1 : rank};
}

void Coordinator::State::make_ready(ProcessSet& set, Call& call, TimePoint now) {
  watch.resolved(call, now);
  call.bytes = info(call.request->kind).fuses ? bytes_of(*call.request) : 0;
  call.payload_bytes = payload_bytes_of(call);
  call.ready_since = now;
  call.order = next_order++;
  ++ready;
  if (may_fuse(*call.request, call.bytes, limits)) {
    call.place = Call::Place::Fusing;
    set.fusing_bytes += call.bytes;
    calls.move(call, set.fusing);
  } else {
    call.place = Call::Place::Alone;
    calls.move(call, set.alone);
  }
}

void Coordinator::State::complete_join(ProcessSet& set, Call& call, TimePoint now) {
  Entry entry = entry_of(set, call);
  entry.value = last_joined;
  finish(call, now);
  emit(std::move(entry));
}

void Coordinator::State::complete_add(ProcessSet& set, Call& call, TimePoint now) {
  const std::vector<int32_t>& ranks = call.request->ranks;
  const auto fail_with = [&](const std::string& why) {
    fail(call, {ErrorKind::InvalidArgument, describe_call(call.kind, call.name) + ": " + why, -1},
         now);
  };
  if (ranks.empty()) return fail_with("a process set needs at least one rank");
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (!set.has(ranks[i])) return fail_with("there is no rank " + std::to_string(ranks[i]));
    if (i > 0 && ranks[i] <= ranks[i - 1]) {
      return fail_with("ranks must be sorted and unique, and these are " +
                       to_string(Shape(ranks.begin(), ranks.end())));
    }
  }
  for (const auto& [uid, other] : sets) {
    if (other.members == ranks) {
      return fail_with("process set " + std::to_string(uid) + " has the same ranks");
    }
  }
  const uint32_t uid = next_set++;
  ProcessSet& added = sets[uid];
  added.uid = uid;
  added.members = ranks;
  added.position.assign(options.names.size(), -1);
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto rank = static_cast<size_t>(ranks[i]);
    added.position[rank] = static_cast<int32_t>(i);
    added.blocked_members += blocked[rank] > 0;
    sets_of[rank].push_back(&added);
  }
  Entry entry = entry_of(set, call);
  entry.value = uid;
  entry.ranks = ranks;
  finish(call, now);
  emit(std::move(entry));
}

void Coordinator::State::complete_remove(ProcessSet& set, Call& call, TimePoint now) {
  const auto uid = static_cast<uint32_t>(call.request->root);
  const auto it = sets.find(uid);
  if (uid == 0 || it == sets.end()) {
    const char* why =
        uid == 0 ? ": the global process set can't be removed" : ": there is no process set ";
    return fail(
        call,
        {ErrorKind::InvalidArgument,
         describe_call(call.kind, call.name) + why + (uid == 0 ? "" : std::to_string(uid)), -1},
        now);
  }
  ProcessSet& removed = it->second;
  const auto fail_pending = [&](Call& pending) {
    fail(pending,
         {ErrorKind::Mismatch,
          describe_call(pending.kind, pending.name) + ": the process set of " +
              describe_ranks(removed.members) + " was removed while this call was pending",
          -1},
         now);
  };
  while (!removed.alone.empty()) fail_pending(removed.alone.front());
  while (!removed.fusing.empty()) fail_pending(removed.fusing.front());
  for (auto next = calls.waiting().begin(); next != calls.waiting().end();) {
    Call& pending = *next++;
    if (pending.set == uid) fail_pending(pending);
  }
  for (int32_t rank : removed.members) {
    std::erase(sets_of[static_cast<size_t>(rank)], &removed);
  }
  cache.forget_set(uid);
  sets.erase(it);
  Entry entry = entry_of(set, call);
  entry.value = uid;
  finish(call, now);
  emit(std::move(entry));
}

// `except`: a rank that waits for nothing any more.
void Coordinator::State::fail(Call& call, const Status& status, TimePoint now, int32_t except) {
  const ProcessSet& set = sets.at(call.set);
  std::vector<int32_t> to;
  for (int32_t rank : set.members) {
    if (rank != except && set.voice(call, rank).said == Voice::Said::Announced) to.push_back(rank);
  }
  const OpKind kind = call.kind;
  const uint32_t uid = call.set;
  const std::string name = call.name;
  finish(call, now);
  if (!to.empty()) emit_error(kind, uid, name, std::move(to), status);
}

void Coordinator::State::finish(Call& call, TimePoint now) {
  watch.resolved(call, now);
  ProcessSet& set = sets.at(call.set);
  for (size_t i = 0; i < call.voices.size(); ++i) {
    const Voice& voice = call.voices[i];
    if (voice.said != Voice::Said::Announced) continue;
    if (voice.blocked) block(set.members[i], -1);
    if (voice.request->kind == OpKind::Join) set_joined(set.members[i], false, now);
  }
  for (Held& next : call.later) held.push_back(std::move(next));
  switch (call.place) {
    case Call::Place::Waiting:
      return calls.finish(call, calls.waiting());
    case Call::Place::Alone:
      --ready;
      return calls.finish(call, set.alone);
    case Call::Place::Fusing:
      --ready;
      set.fusing_bytes -= call.bytes;
      return calls.finish(call, set.fusing);
  }
}

Entry Coordinator::State::entry_of(const ProcessSet& set, const Call& call) const {
  Entry entry;
  entry.kind = call.request->kind;
  entry.set = call.set;
  entry.contributors = call.everyone ? set.members : call.contributors;
  entry.items.push_back({0, call.name});
  return entry;
}

void Coordinator::State::emit_ready(ProcessSet& set, TimePoint now) {
  while (set.in_flight < kMostInFlight) {
    const bool flush = flush_due(set, now);
    if (!flush && set.alone.empty()) return;
    const bool fused =
        flush && (set.alone.empty() || set.fusing.front().order < set.alone.front().order);
    emit_data(set, fused ? set.fusing : set.alone, now);
  }
}

bool Coordinator::State::flush_due(const ProcessSet& set, TimePoint now) const {
  if (set.fusing.empty()) return false;
  const Duration age = now - set.fusing.front().ready_since;
  if (options.min_cycle > Duration{}) {
    return age >= options.min_cycle || set.fusing_bytes >= limits.entry_bytes;
  }
  return set.fusing_bytes >= options.flush_bytes || age >= options.flush_after ||
         someone_waits(set);
}

// When the set's calls will have waited long enough for company.
TimePoint Coordinator::State::flush_time(const ProcessSet& set) const {
  if (set.fusing.empty() || set.in_flight >= kMostInFlight) return TimePoint::max();
  return set.fusing.front().ready_since +
         (options.min_cycle > Duration{} ? options.min_cycle : options.flush_after);
}

// Whether a contributor of something ready is blocked, on whatever call.
bool Coordinator::State::someone_waits(const ProcessSet& set) const {
  if (set.blocked_members == 0) return false;
  const auto waits = [&](int32_t rank) { return blocked[static_cast<size_t>(rank)] > 0; };
  for (const Call& call : set.fusing) {
    if (call.everyone) return true;  // some member is blocked, and all contribute
    if (std::any_of(call.contributors.begin(), call.contributors.end(), waits)) return true;
  }
  return false;
}

// The first call of `from`, with all that fits behind it if it fuses. If every contributor has sent
// the payload of every call, and they are small, the entry carries them all, and moves no data.
void Coordinator::State::emit_data(ProcessSet& set, CallList& from, TimePoint now) {
  Call& first = from.front();
  Entry entry;
  entry.kind = first.request->kind;
  entry.set = set.uid;
  entry.contributors = first.everyone ? set.members : first.contributors;

  const std::shared_ptr<const Request> request = first.request;
  uint64_t bytes = first.bytes;
  size_t name_bytes = first.name.size();
  const bool everyone = first.everyone;
  const bool fuses = first.place == Call::Place::Fusing;
  const uint64_t tensors_before = counters.tensors;
  uint64_t terms_bytes = 0;
  bool carries = true;
  payloads.assign(entry.contributors.size(), {});
  const auto add = [&](Call& call) {
    terms_bytes += call.payload_bytes * payloads.size();
    carries = carries && call.payload_bytes > 0 && terms_bytes <= options.inline_bytes;
    if (carries) {
      auto payload = payloads.begin();
      for (const Voice& voice : call.voices) {
        if (voice.said == Voice::Said::Announced) *payload++ += voice.payload;
      }
    }
    take(call, entry, now);
  };
  auto next = std::next(from.begin());
  add(first);
  for (size_t looked = 0; fuses && next != from.end() && looked < kLookAhead; ++looked) {
    Call& call = *next++;
    const bool same_ranks =
        call.everyone == everyone && (everyone || call.contributors == entry.contributors);
    if (!same_ranks || !same_work(*call.request, *request) ||
        call.bytes > limits.entry_bytes - bytes || call.name.size() > kMaxNameBytes - name_bytes) {
      continue;
    }
    bytes += call.bytes;
    name_bytes += call.name.size();
    add(call);
  }
  if (entry.items.size() > 1) counters.fused_tensors += counters.tensors - tensors_before;
  if (carries) {
    for (const std::string& payload : payloads) entry.terms += payload;
  } else {
    ++set.in_flight;
    flights.push_back({next_seq, set.uid, entry.contributors.front()});
  }
  emit(std::move(entry));
}

// Makes a ready call an item of `entry`.
void Coordinator::State::take(Call& call, Entry& entry, TimePoint now) {
  EntryItem item;
  bool all_know = false;
  if (options.cache_capacity > 0 && !call.request->unnamed) {
    item.id = cache.find(*call.request);
    all_know = item.id != 0;
    if (!all_know) item.id = next_id++;
    cache.learn(item.id, call.request);
    for (const Voice& voice : call.voices) {
      all_know = all_know && (voice.said != Voice::Said::Announced || voice.id == item.id);
    }
  }
  if (!all_know) item.name = call.name;
  entry.items.push_back(std::move(item));
  counters.tensors += call.request->tensors.size();
  finish(call, now);
}

// A rank that left may go once all it takes part in is in the order, and it has nothing to report.
void Coordinator::State::acknowledge() {
  const auto takes_part = [](const ProcessSet& set, const CallList& ready_calls, int32_t rank) {
    return std::any_of(ready_calls.begin(), ready_calls.end(), [&](const Call& call) {
      return set.voice(call, rank).said == Voice::Said::Announced;
    });
  };
  const auto may_go = [&](int32_t rank) {
    for (const ProcessSet* set : sets_of[static_cast<size_t>(rank)]) {
      if (takes_part(*set, set->alone, rank) || takes_part(*set, set->fusing, rank)) return false;
    }
    return std::none_of(flights.begin(), flights.end(),
                        [&](const Flight& flight) { return flight.reporter == rank; });
  };
  std::erase_if(leaving, [&](int32_t rank) {
    if (!may_go(rank)) return false;
    Entry entry;
    entry.kind = OpKind::Shutdown;
    entry.contributors = {rank};
    emit(std::move(entry));
    return true;
  });
}

void Coordinator::State::emit(Entry entry) {
  entry.seq = next_seq++;
  entry.plan_hash = options.plan_hash;
  ++counters.entries;
  if (!entry.status.ok()) ++counters.errors;
  std::vector<int32_t> to = entry.contributors;
  outbox.push_back({std::move(to), std::move(entry)});
}

void Coordinator::State::emit_error(OpKind kind, uint32_t set, const std::string& name,
                                    std::vector<int32_t> to, Status status) {
  Entry entry;
  entry.kind = kind;
  entry.set = set;
  entry.contributors = std::move(to);
  entry.items.push_back({0, name});
  entry.status = std::move(status);
  emit(std::move(entry));
}

Scene Coordinator::State::scene() const {
  return {calls.waiting(), sets, joined, left,
          live_ranks > 0 && waiting_ranks == live_ranks && ready == 0 && flights.empty() &&
              leaving.empty() && !calls.waiting().empty()};
}

}  // namespace horovod
