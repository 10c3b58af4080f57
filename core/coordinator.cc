// L4: the coordinator: takes what ranks say. Must not do I/O, own a thread or read a clock.
//
// A message changes the state in receive(); what that makes possible at once (errors, barriers,
// sets) is put into the outbox there and then, data entries are made in decide(). Every loop that
// reaches the outbox runs over lists and ordered maps: the same input gives the same output.
#include "coordinator.h"

#include <algorithm>
#include <utility>

#include "coordinator_state.h"
#include "describe.h"

namespace horovod {
namespace {

bool concerns_all_ranks(OpKind kind) {
  return kind == OpKind::Join || kind == OpKind::AddSet || kind == OpKind::RemoveSet;
}

// Whether what the rank says now belongs to the next round of the name: its call of this round was
// rejected, or the round is agreed on without it, because it had joined.
bool spoke_for_this_round(const Call& call, const Voice& voice) {
  return voice.said == Voice::Said::Rejected || call.place != Call::Place::Waiting;
}

}  // namespace

Coordinator::State::State(CoordinatorOptions given)
    : options(std::move(given)),
      limits{std::min(options.fusion_threshold_bytes, options.max_entry_bytes),
             options.disable_group_fusion},
      next_set(options.first_set),
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
  owed.resize(size);
  late.resize(size);
  live_ranks = size;
}

void Coordinator::State::on(int32_t rank, Announce&& item, TimePoint now) {
  std::vector<uint64_t>& ids = owed[static_cast<size_t>(rank)];
  std::vector<Announce>& waiting_items = late[static_cast<size_t>(rank)];
  if (concerns_all_ranks(item.request.kind) && !ids.empty()) {
    waiting_items.push_back(std::move(item));
    return;
  }
  if (item.resends != 0) std::erase(ids, item.resends);
  announce(rank,
           {Voice::Said::Announced, item.blocked, 0,
            std::make_shared<const Request>(std::move(item.request)), std::move(item.payload)},
           now);
  if (!ids.empty()) return;
  for (Announce& next : std::exchange(waiting_items, {})) on(rank, std::move(next), now);
}

void Coordinator::State::on(int32_t rank, AnnounceCached&& item, TimePoint now) {
  const std::shared_ptr<const Request>& request = cache.request_of(item.id);
  if (request == nullptr) {
    outbox.push_back({{rank}, Resend{item.id}});
    owed[static_cast<size_t>(rank)].push_back(item.id);
    return;
  }
  ++counters.cached_announcements;
  announce(rank, {Voice::Said::Announced, item.blocked, item.id, request, std::move(item.payload)},
           now);
}

void Coordinator::State::on(int32_t rank, Blocked&& item, TimePoint) {
  for (Announce& later : late[static_cast<size_t>(rank)]) {
    if (later.request.set == item.set && later.request.name == item.name) later.blocked = true;
  }
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
  owed[place].clear();
  late[place].clear();
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

void Coordinator::State::on(int32_t rank, Located&& item, TimePoint) { watch.located(rank, item); }

void Coordinator::State::announce(int32_t rank, Voice voice, TimePoint now) {
  const Request& request = *voice.request;
  watch.heard(rank, request.kind, request.name, now);
  Status status = objection(rank, request);
  if (status.ok()) {
    ProcessSet& set = sets.at(request.set);
    Call* call = calls.find(set.uid, request.name);
    if (call != nullptr && set.voice(*call, rank).said == Voice::Said::Announced) {
      return hear_twice(set, *call, rank, now);
    }
    if (!joined[static_cast<size_t>(rank)]) {
      if (call == nullptr) call = &start_call(set, request.kind, request.name, now);
      return hear(set, *call, rank, std::move(voice), now);
    }
    status = {
        ErrorKind::InvalidArgument,
        describe_call(request.kind, request.name) + ": called after join() and before it returned",
        rank};
  }
  emit_error(request.kind, request.set, request.name, {rank}, std::move(status));
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
    if (uid < next_set) return {ErrorKind::Mismatch, label() + "its process set was removed", -1};
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

Call& Coordinator::State::start_call(ProcessSet& set, OpKind kind, const std::string& name,
                                     TimePoint now) {
  Call& call = calls.start(set, kind, name, now);
  call.missing = set.members.size();
  if (kind != OpKind::Join) {
    for (int32_t rank : set.members) call.missing -= joined[static_cast<size_t>(rank)];
  }
  return call;
}

Call& Coordinator::State::find_or_start(ProcessSet& set, OpKind kind, const std::string& name,
                                        TimePoint now) {
  Call* call = calls.find(set.uid, name);
  return call != nullptr ? *call : start_call(set, kind, name, now);
}

void Coordinator::State::hear(ProcessSet& set, Call& call, int32_t rank, Voice said,
                              TimePoint now) {
  const OpKind kind = said.request->kind;
  Voice& voice = set.voice(call, rank);
  if (said.blocked) block(rank, +1);
  if (spoke_for_this_round(call, voice)) {
    call.later.push_back(
        {rank, std::move(said.request), said.blocked, {}, std::move(said.payload)});
    return;
  }
  if (call.kind == OpKind::Join || !joined[static_cast<size_t>(rank)]) --call.missing;
  voice = std::move(said);
  ++call.announced;
  if (kind == OpKind::Join) {
    last_joined = rank;
    set_joined(rank, true, now);
  }
  if (call.missing == 0) complete(call, now);
}

void Coordinator::State::hear_rejection(ProcessSet& set, int32_t rank, Reject&& item,
                                        TimePoint now) {
  Call& call = find_or_start(set, item.kind, item.name, now);
  Voice& voice = set.voice(call, rank);
  if (voice.said == Voice::Said::Announced) return;
  if (spoke_for_this_round(call, voice)) {
    call.later.push_back({rank, nullptr, false, std::move(item), {}});
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
  voice = {};
  voice.said = Voice::Said::Rejected;
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
    Call& call = find_or_start(set, next.request->kind, next.request->name, now);
    hear(
        set, call, next.rank,
        {Voice::Said::Announced, next.blocked, 0, std::move(next.request), std::move(next.payload)},
        now);
  }
}

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

Coordinator::Coordinator(CoordinatorOptions options)
    : state_(std::make_unique<State>(std::move(options))) {}

Coordinator::~Coordinator() = default;

void Coordinator::receive(int32_t rank, Item item, TimePoint now) {
  State& s = *state_;
  if (s.aborted || rank < 0 || static_cast<size_t>(rank) >= s.left.size()) return;
  // An answer is no sign that the program goes on.
  if (!std::holds_alternative<Located>(item)) s.watch.arrived(now);
  // Entries that were on their way when a rank left still end there.
  if (s.left[static_cast<size_t>(rank)] && !std::holds_alternative<Done>(item)) return;
  std::visit([&](auto&& given) { s.on(rank, std::move(given), now); }, std::move(item));
  s.replay(now);
}

void Coordinator::decide(TimePoint now, std::vector<Outgoing>& out, std::vector<LogLine>& log) {
  State& s = *state_;
  if (!s.aborted) {
    while (auto crossing = s.watch.look_for_crossing(s.scene(), s.calls.waiting(), now)) {
      for (Call* call : {crossing->first, crossing->second}) {
        std::string text = describe_call(call->kind, call->name) + ": " + crossing->text;
        s.fail(*call, {ErrorKind::Mismatch, std::move(text), -1}, now);
      }
    }
    do {
      s.replay(now);
      for (auto& [uid, set] : s.sets) s.emit_ready(set, now);
    } while (!s.held.empty());
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
  s.watch.take_questions(out);
  s.watch.take_log(log);
}

TimePoint Coordinator::next_deadline() const {
  const State& s = *state_;
  if (s.aborted) return TimePoint::max();
  TimePoint next = s.watch.next_deadline(s.scene());
  for (const auto& [uid, set] : s.sets) next = std::min(next, s.flush_time(set));
  return next;
}

bool Coordinator::all_left() const { return state_->live_ranks == 0; }

const Coordinator::Counters& Coordinator::counters() const { return state_->counters; }

}  // namespace horovod
