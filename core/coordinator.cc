// L4: the coordinator: from what ranks say to entries of one global order. Must not do I/O, own a
// thread or read a clock.
//
// A message changes the state in receive(); what that makes possible at once (errors, barriers,
// sets) is put into the outbox there and then, data entries are made in decide(). Every loop that
// reaches the outbox runs over lists and ordered maps: the same input gives the same output.
#include "coordinator.h"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "agreement.h"
#include "cache.h"
#include "calls.h"
#include "describe.h"
#include "fusion.h"
#include "watch.h"

namespace horovod {
namespace {

constexpr size_t kMostInFlight = 2;  // entries of one set

// Joined ranks are left out of such calls instead of making them an error. A change of sets needs
// every rank: one that missed it would not know the set.
bool leaves_out_joined(OpKind kind, bool join_all_ops) {
  if (kind == OpKind::AddSet || kind == OpKind::RemoveSet) return false;
  return info(kind).joinable || (join_all_ops && info(kind).moves_data);
}

bool concerns_all_ranks(OpKind kind) {
  return kind == OpKind::Join || kind == OpKind::AddSet || kind == OpKind::RemoveSet;
}

}  // namespace

struct Coordinator::State {
  explicit State(CoordinatorOptions given);

  // ---- Items (receive) ----
  void on(int32_t rank, Announce&& item, TimePoint now);
  void on(int32_t rank, AnnounceCached&& item, TimePoint now);
  void on(int32_t rank, Blocked&& item, TimePoint now);
  void on(int32_t rank, Reject&& item, TimePoint now);
  void on(int32_t rank, Done&& item, TimePoint now);
  void on(int32_t rank, Leave&& item, TimePoint now);
  void announce(int32_t rank, std::shared_ptr<const Request> request, uint64_t id, bool blocked,
                TimePoint now);
  Status objection(int32_t rank, const Request& request) const;
  Status set_objection(int32_t rank, OpKind kind, uint32_t set, const std::string& name) const;
  Call& call_of(ProcessSet& set, OpKind kind, const std::string& name, TimePoint now);
  void hear(ProcessSet& set, int32_t rank, std::shared_ptr<const Request> request, uint64_t id,
            bool blocked, TimePoint now);
  void hear_rejection(ProcessSet& set, int32_t rank, Reject&& item, TimePoint now);
  void hear_twice(ProcessSet& set, Call& call, int32_t rank, TimePoint now);
  void replay(TimePoint now);

  // ---- Calls that everyone has spoken about ----
  void complete(Call& call, TimePoint now);
  Status judge(const ProcessSet& set, Call& call);
  Status describe_rejection(const Call& call) const;
  Entry entry_of(const ProcessSet& set, const Call& call) const;
  void make_ready(ProcessSet& set, Call& call, TimePoint now);
  void complete_join(ProcessSet& set, Call& call, TimePoint now);
  void complete_add(ProcessSet& set, Call& call, TimePoint now);
  void complete_remove(ProcessSet& set, Call& call, TimePoint now);
  void fail(Call& call, const Status& status, TimePoint now, int32_t except = -1);
  void finish(Call& call, TimePoint now);

  // ---- Ranks ----
  void block(int32_t rank, int change);
  void set_joined(int32_t rank, bool joined, TimePoint now);
  void note_waiting(int32_t rank);

  // ---- Entries (decide) ----
  void emit_ready(ProcessSet& set, TimePoint now);
  bool flush_due(const ProcessSet& set, TimePoint now) const;
  bool someone_waits(const ProcessSet& set) const;
  void emit_data(ProcessSet& set, CallList& from, TimePoint now);
  void take(Call& call, Entry& entry, TimePoint now);
  void acknowledge();
  void emit(Entry entry);
  void emit_error(OpKind kind, uint32_t set, const std::string& name, std::vector<int32_t> to,
                  Status status);
  Scene scene() const;

  const CoordinatorOptions options;
  const FusionLimits limits;
  Counters counters;

  std::map<uint32_t, ProcessSet> sets;
  uint32_t next_set = 1;
  std::vector<std::vector<ProcessSet*>> sets_of;  // by rank
  Calls calls;
  NameCache cache;
  uint64_t next_id = 1;
  uint64_t next_seq = 1;
  uint64_t next_order = 1;
  size_t ready = 0;  // calls

  struct Flight {
    uint64_t seq;
    uint32_t set;
    int32_t reporter;
  };
  std::vector<Flight> flights;

  std::vector<uint8_t> joined, left, waiting;  // by rank
  std::vector<std::string> left_text;
  std::vector<size_t> blocked;  // by rank: blocked calls without an entry
  size_t waiting_ranks = 0;     // live ranks that are blocked or joined
  size_t live_ranks = 0;
  std::vector<int32_t> leaving;  // not acknowledged yet
  int32_t last_joined = -1;

  std::vector<Outgoing> outbox;
  std::deque<Held> held;  // their next round can start
  Watch watch;
  bool aborted = false;

  std::vector<Vote> votes;      // scratch of judge()
  std::vector<int32_t> absent;  // scratch of judge()
};

Coordinator::State::State(CoordinatorOptions given)
    : options(std::move(given)),
      limits{std::min(options.fusion_threshold_bytes, options.max_entry_bytes),
             options.disable_group_fusion},
      cache(options.cache_capacity),
      watch(options) {
  const size_t size = options.names.size();
  ProcessSet& all = sets[0];
  for (size_t rank = 0; rank < size; ++rank) {
    all.members.push_back(static_cast<int32_t>(rank));
    all.position.push_back(static_cast<int32_t>(rank));
  }
  sets_of.assign(size, {&all});
  joined.resize(size);
  left.resize(size);
  waiting.resize(size);
  left_text.resize(size);
  blocked.resize(size);
  live_ranks = size;
}

// ---- Items
// ---------------------------------------------------------------------------------------

void Coordinator::State::on(int32_t rank, Announce&& item, TimePoint now) {
  announce(rank, std::make_shared<const Request>(std::move(item.request)), 0, item.blocked, now);
}

void Coordinator::State::on(int32_t rank, AnnounceCached&& item, TimePoint now) {
  const std::shared_ptr<const Request>& request = cache.request_of(item.id);
  if (request == nullptr) {
    outbox.push_back({{rank}, Resend{item.id}});
    return;
  }
  ++counters.cached_announcements;
  announce(rank, request, item.id, item.blocked, now);
}

void Coordinator::State::on(int32_t rank, Blocked&& item, TimePoint) {
  const auto it = sets.find(item.set);
  if (it == sets.end() || !it->second.has(rank)) return;
  Call* call = calls.find(item.set, item.name);
  if (call == nullptr) return;  // its entry is on its way
  bool* flag = nullptr;
  Voice& voice = it->second.voice(*call, rank);
  if (voice.said == Voice::Said::Announced) flag = &voice.blocked;
  for (Held& later : call->later) {
    if (later.rank == rank && later.request != nullptr) flag = &later.blocked;
  }
  if (flag == nullptr || *flag) return;
  *flag = true;
  block(rank, +1);
}

void Coordinator::State::on(int32_t rank, Reject&& item, TimePoint now) {
  if (joined[static_cast<size_t>(rank)] ||
      !set_objection(rank, item.kind, item.set, item.name).ok()) {
    return;  // nobody will wait for it
  }
  watch.heard(rank, item.kind, item.name, now);
  hear_rejection(sets.at(item.set), rank, std::move(item), now);
}

void Coordinator::State::on(int32_t rank, Done&& item, TimePoint) {
  const auto flight = std::find_if(flights.begin(), flights.end(), [&](const Flight& f) {
    return f.seq == item.seq && f.reporter == rank;
  });
  if (flight == flights.end()) return;
  if (const auto it = sets.find(flight->set); it != sets.end()) --it->second.in_flight;
  flights.erase(flight);
}

// What the rank announced and nobody can run any more is withdrawn; calls that are ready are agreed
// on and keep their place before its acknowledgement.
void Coordinator::State::on(int32_t rank, Leave&& item, TimePoint now) {
  const auto place = static_cast<size_t>(rank);
  left[place] = 1;
  left_text[place] = std::move(item.text);
  --live_ranks;
  for (ProcessSet* set : sets_of[place]) {
    if (set->left < 0) set->left = rank;
  }
  for (auto it = calls.waiting().begin(); it != calls.waiting().end();) {
    Call& call = *it++;
    const ProcessSet& set = sets.at(call.set);
    if (!set.has(rank)) continue;
    fail(call, set_objection(set.members.front(), call.kind, call.set, call.name), now, rank);
  }
  block(rank, +1);  // so that its ready calls don't wait for company
  note_waiting(rank);
  leaving.push_back(rank);
}

void Coordinator::State::announce(int32_t rank, std::shared_ptr<const Request> request, uint64_t id,
                                  bool blocked_now, TimePoint now) {
  watch.heard(rank, request->kind, request->name, now);
  Status status = objection(rank, *request);
  if (status.ok()) {
    ProcessSet& set = sets.at(request->set);
    Call* call = calls.find(set.uid, request->name);
    if (call != nullptr && set.voice(*call, rank).said == Voice::Said::Announced) {
      return hear_twice(set, *call, rank, now);
    }
    if (!joined[static_cast<size_t>(rank)]) {
      return hear(set, rank, std::move(request), id, blocked_now, now);
    }
    status = {ErrorKind::InvalidArgument,
              describe_call(request->kind, request->name) +
                  ": called after join() and before it returned",
              rank};
  }
  emit_error(request->kind, request->set, request->name, {rank}, std::move(status));
}

Status Coordinator::State::objection(int32_t rank, const Request& request) const {
  if (request.kind == OpKind::Shutdown || (concerns_all_ranks(request.kind) && request.set != 0)) {
    return {ErrorKind::InvalidArgument,
            describe_call(request.kind, request.name) + ": not a call of process set " +
                std::to_string(request.set),
            rank};
  }
  return set_objection(rank, request.kind, request.set, request.name);
}

Status Coordinator::State::set_objection(int32_t rank, OpKind kind, uint32_t uid,
                                         const std::string& name) const {
  const auto it = sets.find(uid);
  const auto label = [&] { return describe_call(kind, name) + ": "; };
  const auto which = [&] { return "process set " + std::to_string(uid); };
  if (it == sets.end()) {
    if (uid < next_set) return {ErrorKind::Mismatch, label() + which() + " was removed", -1};
    return {ErrorKind::InvalidArgument, label() + "there is no " + which(), rank};
  }
  if (!it->second.has(rank)) {
    return {ErrorKind::InvalidArgument,
            label() + "rank " + std::to_string(rank) + " is not a member of " + which(), rank};
  }
  const int32_t gone = it->second.left;
  if (gone < 0) return {};
  const std::string& text = left_text[static_cast<size_t>(gone)];
  return {ErrorKind::Shutdown,
          label() + describe_rank(gone, options.names) + " has left" +
              (text.empty() ? "" : ": " + text),
          gone};
}

Call& Coordinator::State::call_of(ProcessSet& set, OpKind kind, const std::string& name,
                                  TimePoint now) {
  if (Call* call = calls.find(set.uid, name)) return *call;
  Call& call = calls.start(set, kind, name, now);
  call.missing = set.members.size();
  if (kind != OpKind::Join) {
    for (int32_t rank : set.members) call.missing -= joined[static_cast<size_t>(rank)];
  }
  return call;
}

void Coordinator::State::hear(ProcessSet& set, int32_t rank, std::shared_ptr<const Request> request,
                              uint64_t id, bool blocked_now, TimePoint now) {
  const OpKind kind = request->kind;
  Call& call = call_of(set, kind, request->name, now);
  Voice& voice = set.voice(call, rank);
  if (blocked_now) block(rank, +1);
  if (voice.said == Voice::Said::Rejected) {
    call.later.push_back({rank, std::move(request), blocked_now, {}});
    return;
  }
  if (call.kind == OpKind::Join || !joined[static_cast<size_t>(rank)]) --call.missing;
  voice = {Voice::Said::Announced, blocked_now, id, std::move(request)};
  ++call.announced;
  if (kind == OpKind::Join) {
    last_joined = rank;
    set_joined(rank, true, now);
  }
  if (call.missing == 0) complete(call, now);
}

void Coordinator::State::hear_rejection(ProcessSet& set, int32_t rank, Reject&& item,
                                        TimePoint now) {
  Call& call = call_of(set, item.kind, item.name, now);
  Voice& voice = set.voice(call, rank);
  if (voice.said == Voice::Said::Announced) return;
  if (voice.said == Voice::Said::Rejected) {
    call.later.push_back({rank, nullptr, false, std::move(item)});
    return;
  }
  if (call.kind == OpKind::Join || !joined[static_cast<size_t>(rank)]) --call.missing;
  voice.said = Voice::Said::Rejected;
  call.rejected.emplace_back(rank, std::move(item.text));
  if (call.missing == 0) complete(call, now);
}

// No engine does this. The rank loses the call, and it counts as rejected by it.
void Coordinator::State::hear_twice(ProcessSet& set, Call& call, int32_t rank, TimePoint now) {
  const std::string text = describe_call(call.kind, call.name) + ": rank " + std::to_string(rank) +
                           " announced it twice";
  if (call.place != Call::Place::Waiting) {
    fail(call, {ErrorKind::Mismatch, text, rank}, now);
    return;
  }
  emit_error(call.kind, call.set, call.name, {rank}, {ErrorKind::InvalidArgument, text, rank});
  Voice& voice = set.voice(call, rank);
  const bool was_blocked = voice.blocked;
  const bool was_join = voice.request->kind == OpKind::Join;
  voice = {Voice::Said::Rejected, false, 0, nullptr};
  --call.announced;
  call.rejected.emplace_back(rank, "it was announced twice");
  if (was_blocked) block(rank, -1);
  if (was_join) set_joined(rank, false, now);
}

void Coordinator::State::replay(TimePoint now) {
  while (!held.empty()) {
    Held next = std::move(held.front());
    held.pop_front();
    if (next.blocked) block(next.rank, -1);
    if (left[static_cast<size_t>(next.rank)]) continue;
    if (next.request == nullptr) {
      const Reject& r = next.rejection;
      if (set_objection(next.rank, r.kind, r.set, r.name).ok()) {
        hear_rejection(sets.at(r.set), next.rank, std::move(next.rejection), now);
      }
      continue;
    }
    if (Status status = objection(next.rank, *next.request); !status.ok()) {
      emit_error(next.request->kind, next.request->set, next.request->name, {next.rank},
                 std::move(status));
      continue;
    }
    ProcessSet& set = sets.at(next.request->set);
    hear(set, next.rank, std::move(next.request), 0, next.blocked, now);
  }
}

// ---- Calls that everyone has spoken about
// ----------------------------------------------------------

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
          describe_call(pending.kind, pending.name) + ": process set " + std::to_string(uid) +
              " was removed while this call was pending",
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

// ---- Ranks
// ---------------------------------------------------------------------------------------

void Coordinator::State::block(int32_t rank, int change) {
  const auto place = static_cast<size_t>(rank);
  const bool before = blocked[place] > 0;
  blocked[place] += static_cast<size_t>(change);
  const bool after = blocked[place] > 0;
  if (before == after) return;
  for (ProcessSet* set : sets_of[place]) set->blocked_members += after ? size_t{1} : size_t(-1);
  note_waiting(rank);
}

// A rank that joins is no longer missing anywhere, and is missing again once it returns from
// join().
void Coordinator::State::set_joined(int32_t rank, bool now_joined, TimePoint now) {
  joined[static_cast<size_t>(rank)] = now_joined;
  note_waiting(rank);
  for (auto it = calls.waiting().begin(); it != calls.waiting().end();) {
    Call& call =
        *it++;  // complete() ends no other waiting call: sets don't change while one has joined
    const ProcessSet& set = sets.at(call.set);
    if (call.kind == OpKind::Join || !set.has(rank)) continue;
    if (set.voice(call, rank).said != Voice::Said::Nothing) continue;
    if (!now_joined) {
      ++call.missing;
    } else if (--call.missing == 0) {
      complete(call, now);
    }
  }
}

void Coordinator::State::note_waiting(int32_t rank) {
  const auto place = static_cast<size_t>(rank);
  const bool waits = !left[place] && (blocked[place] > 0 || joined[place]);
  if (waits == (waiting[place] != 0)) return;
  waiting[place] = waits;
  waiting_ranks += waits ? size_t{1} : size_t(-1);
}

// ---- Entries
// -------------------------------------------------------------------------------------

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

// The first call of `from`, with all that fits behind it if it fuses.
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
  auto next = std::next(from.begin());
  take(first, entry, now);
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
    take(call, entry, now);
  }
  if (entry.items.size() > 1) counters.fused_tensors += counters.tensors - tensors_before;
  ++set.in_flight;
  flights.push_back({next_seq, set.uid, entry.contributors.front()});
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

// A rank that left may go once all it takes part in is in the order.
void Coordinator::State::acknowledge() {
  const auto takes_part = [&](const Call& call, int32_t rank) {
    const ProcessSet& set = sets.at(call.set);
    return set.has(rank) && set.voice(call, rank).said == Voice::Said::Announced;
  };
  const auto done = [&](int32_t rank) {
    for (const ProcessSet* set : sets_of[static_cast<size_t>(rank)]) {
      for (const CallList* list : {&set->alone, &set->fusing}) {
        for (const Call& call : *list) {
          if (takes_part(call, rank)) return false;
        }
      }
    }
    Entry entry;
    entry.kind = OpKind::Shutdown;
    entry.contributors = {rank};
    emit(std::move(entry));
    // It won't report any more.
    std::erase_if(flights, [&](const Flight& flight) {
      if (flight.reporter != rank) return false;
      if (const auto it = sets.find(flight.set); it != sets.end()) --it->second.in_flight;
      return true;
    });
    return true;
  };
  std::erase_if(leaving, done);
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

// ---- The interface
// -------------------------------------------------------------------------------

Coordinator::Coordinator(CoordinatorOptions options)
    : state_(std::make_unique<State>(std::move(options))) {}

Coordinator::~Coordinator() = default;

void Coordinator::receive(int32_t rank, Item item, TimePoint now) {
  State& s = *state_;
  if (s.aborted || rank < 0 || static_cast<size_t>(rank) >= s.left.size()) return;
  s.watch.arrived(now);
  // Entries that were on their way when a rank left still end there.
  if (s.left[static_cast<size_t>(rank)] && !std::holds_alternative<Done>(item)) return;
  std::visit([&](auto&& given) { s.on(rank, std::move(given), now); }, std::move(item));
  s.replay(now);
}

void Coordinator::decide(TimePoint now, std::vector<Outgoing>& out, std::vector<LogLine>& log) {
  State& s = *state_;
  if (!s.aborted) {
    for (auto& [uid, set] : s.sets) s.emit_ready(set, now);
    if (!s.leaving.empty()) s.acknowledge();
    if (std::optional<Status> end = s.watch.look(s.scene(), s.calls.waiting(), now)) {
      s.aborted = true;
      log.push_back({40, end->text});
      std::vector<int32_t> to;
      for (size_t rank = 0; rank < s.left.size(); ++rank) {
        if (!s.left[rank]) to.push_back(static_cast<int32_t>(rank));
      }
      s.outbox.push_back({std::move(to), Abort{std::move(*end)}});
    }
  }
  for (Outgoing& outgoing : s.outbox) out.push_back(std::move(outgoing));
  s.outbox.clear();
  s.watch.take_log(log);
}

TimePoint Coordinator::next_deadline() const {
  const State& s = *state_;
  if (s.aborted) return TimePoint::max();
  TimePoint next = s.watch.next_deadline(s.scene());
  const Duration patience =
      s.options.min_cycle > Duration{} ? s.options.min_cycle : s.options.flush_after;
  for (const auto& [uid, set] : s.sets) {
    if (set.fusing.empty() || set.in_flight >= kMostInFlight) continue;
    next = std::min(next, set.fusing.front().ready_since + patience);
  }
  return next;
}

bool Coordinator::all_left() const { return state_->live_ranks == 0; }

const Coordinator::Counters& Coordinator::counters() const { return state_->counters; }

}  // namespace horovod
