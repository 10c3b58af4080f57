// L5: one pass. Must not know threads, handles or how anyone waits.

#include "progress.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>

#include "describe.h"

namespace horovod {
namespace {

constexpr size_t kInFlight =
    2;  // entries that advance at once; the coordinator limits them per set
constexpr int32_t kCoordinator = 0;

bool moves_data(const Entry& entry) { return info(entry.kind).moves_data; }

std::span<const std::byte> bytes_of(const std::string& s) {
  return std::as_bytes(std::span(s.data(), s.size()));
}

// What the wire can carry of it.
uint64_t inline_bytes(const Plan& plan) { return std::min<uint64_t>(plan.inline_bytes, kMaxTerms); }

CoordinatorOptions coordinator_options(const ProgressOptions& o) {
  CoordinatorOptions c;
  c.names = o.names;
  c.fusion_threshold_bytes = o.plan.fusion_threshold_bytes;
  c.inline_bytes = inline_bytes(o.plan);
  c.cache_capacity = o.plan.cache_capacity;
  c.join_all_ops = o.plan.join_all_ops != 0;
  c.disable_group_fusion = o.plan.disable_group_fusion != 0;
  c.plan_hash = o.plan.hash();
  c.first_set = o.first_set;
  c.stall_warning = o.stall_warning;
  c.stall_shutdown = o.stall_shutdown;
  c.deadlock = o.deadlock;
  c.min_cycle = std::chrono::microseconds(o.plan.cycle_time_us);
  return c;
}

}  // namespace

uint64_t Plan::hash() const {  // FNV-1a, doi:10.17487/RFC9923
  uint64_t h = 14695981039346656037ull;
  for (const PlanField& field : kPlanFields) {
    const uint64_t value = this->*field.value;
    for (int shift = 0; shift < 64; shift += 8) {
      h = (h ^ ((value >> shift) & 0xff)) * 1099511628211ull;
    }
  }
  return h;
}

Progress::Progress(ProgressOptions options)
    : rank_(options.rank),
      names_(options.names),
      plan_(options.plan),
      plan_hash_(options.plan.hash()),
      transport_(std::move(options.transport)),
      mesh_(*transport_, *options.kernels, options.names.size(), options.stores),
      announcer_(options.plan.cache_capacity),
      peers_(options.names.size()),
      heartbeat_(options.names.size() > 1 ? options.heartbeat : Duration{}) {
  if (rank_ == kCoordinator) {
    coordinator_ = std::make_unique<Coordinator>(coordinator_options(options));
  }
  std::vector<int32_t> all(names_.size());
  std::iota(all.begin(), all.end(), 0);
  sets_.emplace(0, std::move(all));
}

// ---- From this rank ---------------------------------------------------------------------------

void Progress::submit(LocalCallPtr call, TimePoint now) {
  ++open_calls_;
  if (failure_) return complete(call, *failure_);
  const LocalCall& it = *call;
  last_name_ = it.request.name;
  last_site_ = it.site;
  // What nobody waits for is better fused and sent as a whole. A set that was removed is known to
  // be so here before it is in submit().
  std::string payload;
  if (const auto set = sets_.find(it.request.set); it.blocked && set != sets_.end()) {
    payload = payload_of(it, set->second.size(), inline_bytes(plan_));
  }
  say(announcer_.announce(std::move(call), it.request, it.blocked, std::move(payload)), now);
}

void Progress::blocked(const LocalCall& call, TimePoint now) {
  if (failure_) return;
  if (auto item = announcer_.block(call.request.set, call.request.name)) say(*std::move(item), now);
}

void Progress::reject(Reject reject, TimePoint now) {
  if (!failure_) say(std::move(reject), now);
}

void Progress::leave(TimePoint now) {
  leaving_ = true;
  if (!failure_) say(Leave{}, now);
}

void Progress::peer_closed(int32_t rank) { peers_[rank].closed = true; }

void Progress::say(Item item, TimePoint now) {
  if (coordinator_ != nullptr) {
    coordinator_->receive(rank_, std::move(item), now);
    coordinate_ = true;
    return;
  }
  encode_item(item, rank_, peers_[kCoordinator].out);
}

// ---- The pass ---------------------------------------------------------------------------------

bool Progress::pass(TimePoint now) {
  ++counters_.passes;
  if (failure_) return pass_after_failure(now);
  bool moved = read_control(now);
  moved = coordinate(now) || moved;
  moved = advance_running() || moved;
  for (auto it = running_.begin(); it != running_.end();) {
    if (it->collective == nullptr || !it->collective->finished()) {
      ++it;
      continue;
    }
    Running done = std::move(*it);
    it = running_.erase(it);
    finish(done, now);
  }
  moved = flush_control() || moved;
  look_for_life(now);
  check_closed_peers();
  return moved || failure_;
}

// The epoch is over, but a peer whose control ring was full must still hear why, and must not think
// meanwhile that this rank is frozen.
bool Progress::pass_after_failure(TimePoint now) {
  for (int32_t y = 0; y < size(); ++y) {
    if (y == rank_) continue;
    while (const size_t unread = transport_->read_control(y).size()) {
      transport_->consume_control(y, unread);
    }
  }
  give_sign_of_life(now);
  return flush_control();
}

bool Progress::read_control(TimePoint now) {
  bool moved = false;
  for (int32_t y = 0; y < size(); ++y) {
    if (y == rank_) continue;
    Peer& peer = peers_[y];
    for (auto bytes = transport_->read_control(y); !bytes.empty();
         bytes = transport_->read_control(y)) {
      peer.in.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      transport_->consume_control(y, bytes.size());
    }
    if (peer.in.empty()) continue;
    auto rest = bytes_of(peer.in);
    Frame frame;
    while (!failure_ && decode(rest, frame)) {
      handle(y, std::move(frame), now);
      moved = true;
    }
    peer.in.erase(0, peer.in.size() - rest.size());
  }
  return moved;
}

void Progress::handle(int32_t from, Frame&& frame, TimePoint now) {
  const auto refuse = [&](const char* what) {
    throw Error(ErrorKind::InvalidArgument, describe_rank(from, names_) + " sent " + what, from);
  };
  std::visit(
      [&](auto&& message) {
        using M = std::decay_t<decltype(message)>;
        if constexpr (std::is_same_v<M, Goodbye>) {
          if (!message.status.ok()) return fail(std::move(message.status));
          peers_[from].gone = true;
          // Nothing can be agreed without the coordinator. Whoever needs nothing more never
          // notices.
          if (from == kCoordinator && !leaving_) {
            fail(
                {ErrorKind::Shutdown,
                 describe_rank(0, names_) + " has shut down: its script ended or called shutdown()",
                 0});
          }
        } else if constexpr (std::is_constructible_v<Decision, M>) {
          if (from != kCoordinator) refuse("a decision, but it doesn't coordinate");
          receive(std::move(message), now);
        } else {
          if (coordinator_ == nullptr) refuse("an announcement to a rank that doesn't coordinate");
          if (frame.rank != from) refuse("an announcement in another rank's name");
          coordinator_->receive(from, std::move(message), now);
          coordinate_ = true;
        }
      },
      std::move(frame.message));
}

bool Progress::coordinate(TimePoint now) {
  if (coordinator_ == nullptr) return false;
  if (!coordinate_ && now < coordinator_->next_deadline()) return false;
  coordinate_ = false;
  outgoing_.clear();
  coordinator_->decide(now, outgoing_, log_);
  if (outgoing_.empty()) return false;
  for (const Outgoing& o : outgoing_) send(o);
  flush_control();  // the others wait for nothing that this rank does with the decisions
  for (Outgoing& o : outgoing_) {
    const bool for_me = std::find(o.to.begin(), o.to.end(), rank_) != o.to.end();
    if (for_me) receive(std::move(o.decision), now);
  }
  return true;
}

void Progress::send(const Outgoing& outgoing) {
  frame_.clear();
  for (const int32_t to : outgoing.to) {
    if (to == rank_) continue;
    if (frame_.empty()) encode_decision(outgoing.decision, to, frame_);
    readdress(frame_, to);
    peers_[to].out += frame_;
  }
}

// ---- Decisions --------------------------------------------------------------------------------

void Progress::receive(Decision&& decision, TimePoint now) {
  if (failure_) return;
  if (auto* entry = std::get_if<Entry>(&decision)) return receive_entry(std::move(*entry));
  if (const auto* again = std::get_if<Resend>(&decision)) {
    if (!leaving_) say(announcer_.again(again->id), now);
    return;
  }
  if (const auto* question = std::get_if<Locate>(&decision)) {
    if (!leaving_) say(answer(*question), now);
    return;
  }
  fail(std::move(std::get<Abort>(decision).status));
}

Located Progress::answer(const Locate& question) {
  const LocalCallPtr* call = announcer_.find_call(question.set, question.name);
  const std::string* site = call == nullptr ? last_site_ : (*call)->site;
  return {question.id, call == nullptr ? last_name_ : question.name,
          site == nullptr ? std::string() : *site};
}

void Progress::receive_entry(Entry&& entry) {
  if (entry.plan_hash != plan_hash_) {
    throw Error(ErrorKind::InvalidArgument, "rank 0 follows another plan than this rank");
  }
  if (entry.kind == OpKind::Shutdown) {
    acknowledged_ = true;
    return;
  }
  std::vector<LocalCallPtr> calls = announcer_.take(entry);
  if (!entry.status.ok() || !moves_data(entry)) {
    for (const LocalCallPtr& call : calls) finish_control(entry, call);
    return;
  }
  ++counters_.entries;
  counters_.calls += calls.size();
  if (calls.size() > 1) counters_.fused_calls += calls.size();
  if (!entry.terms.empty()) return reduce_inline(entry, calls);
  std::vector<int32_t> members = sets_.at(entry.set);
  running_.push_back({std::move(entry), std::move(calls), std::move(members), nullptr});
}

// Error entries and those that move no data are done when they arrive.
void Progress::finish_control(const Entry& entry, const LocalCallPtr& call) {
  if (!entry.status.ok()) {
    Status status = entry.status;
    status.text = message_prefix(rank_, size()) + status.text;
    return complete(call, std::move(status));
  }
  call->value = entry.value;
  const auto uid = static_cast<uint32_t>(entry.value);
  if (entry.kind == OpKind::AddSet) sets_[uid] = entry.ranks;
  if (entry.kind == OpKind::RemoveSet) {
    sets_.erase(uid);
    announcer_.forget_set(uid);
  }
  complete(call, {});
}

// All terms have come with the entry.
void Progress::reduce_inline(const Entry& entry, const std::vector<LocalCallPtr>& calls) {
  ++counters_.inline_entries;
  std::vector<Arguments*> arguments;
  for (const LocalCallPtr& call : calls) arguments.push_back(call.get());
  reduce_payloads(arguments, sets_.at(entry.set).size(), entry.contributors.size(),
                  bytes_of(entry.terms), mesh_.kernels());
  for (const LocalCallPtr& call : calls) complete(call, {});
}

// ---- Entries in flight ------------------------------------------------------------------------

bool Progress::advance_running() {
  bool moved = false;
  mesh_.begin_pass();
  for (size_t i = 0; i < std::min(running_.size(), kInFlight); ++i) {
    Running& running = running_[i];
    if (running.collective == nullptr) start(running);
    moved = running.collective->advance(mesh_, i == 0) || moved;
  }
  if (auto finding = mesh_.stores().take_finding(); !finding.empty()) {
    log_.push_back({10, std::move(finding)});
  }
  return moved;
}

void Progress::start(Running& running) {
  const Entry& entry = running.entry;
  std::vector<Arguments*> calls;
  for (const LocalCallPtr& call : running.calls) calls.push_back(call.get());
  running.collective = std::make_unique<Collective>(
      std::move(calls),
      Group{.members = running.members,
            .contributors = entry.contributors,
            .rank = rank_,
            .segment_bytes = std::min(plan_.segment_bytes, transport_->max_slot_bytes()),
            .direct_bytes = plan_.direct_bytes,
            .kernels = &mesh_.kernels()});
}

void Progress::finish(Running& running, TimePoint now) {
  for (const LocalCallPtr& call : running.calls) complete(call, {});
  if (running.entry.contributors.front() == rank_) say(Done{running.entry.seq}, now);
}

// ---- Peers ------------------------------------------------------------------------------------

bool Progress::flush_control() {
  bool moved = false;
  for (int32_t y = 0; y < size(); ++y) {
    std::string& out = peers_[y].out;
    if (out.empty()) continue;
    const size_t n = transport_->write_control(y, bytes_of(out));
    out.erase(0, n);
    moved = moved || n > 0;
  }
  return moved;
}

void Progress::give_sign_of_life(TimePoint now) {
  if (heartbeat_ == Duration{} || now - last_beat_ < heartbeat_ / 8) return;
  transport_->beat();
  last_beat_ = now;
}

// Death is seen by its closed connection; a frozen process keeps that open, but its count of life
// signs stands still.
void Progress::look_for_life(TimePoint now) {
  if (heartbeat_ == Duration{}) return;
  give_sign_of_life(now);
  if (now < next_look_) return;
  const bool overslept =
      now - last_look_ > heartbeat_ / 2;  // we were frozen ourselves: look again first
  last_look_ = now;
  TimePoint oldest = now;
  for (int32_t y = 0; y < size(); ++y) {
    Peer& peer = peers_[y];
    if (y == rank_ || peer.gone) continue;
    const uint64_t beats = transport_->beats_of(y);
    if (beats != peer.beats || overslept) {
      peer.beats = beats;
      peer.alive = now;
    } else if (now - peer.alive > heartbeat_) {
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now - peer.alive);
      return fail({ErrorKind::PeerLost,
                   describe_rank(y, names_) + " gave no sign of life for " +
                       std::to_string(seconds.count()) + " s: it is stopped or its host is gone",
                   y});
    }
    oldest = std::min(oldest, peer.alive);
  }
  next_look_ = std::min(now + heartbeat_ / 4, oldest + heartbeat_ + std::chrono::milliseconds(1));
}

// What a peer said before it ended has been read by now: an end without a goodbye is a death.
void Progress::check_closed_peers() {
  if (failure_) return;
  for (int32_t y = 0; y < size(); ++y) {
    Peer& peer = peers_[y];
    if (!peer.closed || peer.gone) continue;
    if (!transport_->read_control(y).empty())
      continue;  // it spoke after this pass read it: next pass
    fail({ErrorKind::PeerLost, describe_rank(y, names_) + " died without a word", y});
    return;
  }
}

TimePoint Progress::next_deadline() const {
  if (failure_) {
    const bool silent = heartbeat_ == Duration{} || said_all();
    return silent ? TimePoint::max() : last_beat_ + heartbeat_ / 8;
  }
  TimePoint at = coordinator_ == nullptr ? TimePoint::max() : coordinator_->next_deadline();
  if (heartbeat_ != Duration{}) at = std::min(at, next_look_);
  return at;
}

bool Progress::drained() const { return acknowledged_ && running_.empty(); }

bool Progress::others_left() const { return coordinator_ == nullptr || coordinator_->all_left(); }

void Progress::goodbye(const Status& status) {
  for (int32_t y = 0; y < size(); ++y) {
    if (y == rank_ || peers_[y].closed || peers_[y].gone) continue;
    encode(Goodbye{status}, rank_, peers_[y].out);
  }
  flush();
}

bool Progress::flush() {
  flush_control();
  return said_all();
}

bool Progress::said_all() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& p) { return p.out.empty() || p.closed || p.gone; });
}

// ---- Ends -------------------------------------------------------------------------------------

void Progress::fail(Status status, bool tell) {
  if (failure_) return;
  failure_ = status;
  if (tell) goodbye(status);
  std::vector<LocalCallPtr> calls;
  for (const Running& running : running_) {
    calls.insert(calls.end(), running.calls.begin(), running.calls.end());
  }
  running_.clear();
  for (LocalCallPtr& call : announcer_.take_all()) calls.push_back(std::move(call));
  for (const LocalCallPtr& call : calls) complete(call, status);
}

void Progress::fail_because_of(const std::exception& error) {
  Status status{ErrorKind::PeerLost, std::string("internal error: ") + error.what(), -1};
  if (const auto* typed = dynamic_cast<const Error*>(&error)) {
    status = typed->status();
    if (status.kind == ErrorKind::InvalidArgument) status.kind = ErrorKind::PeerLost;
  } else if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    status = {ErrorKind::Resource, "no memory for the engine's own work", -1};
  }
  if (status.rank < 0) {
    status.rank = rank_;
    status.text = describe_rank(rank_, names_) + ": " + status.text;
  }
  fail(std::move(status));
}

void Progress::complete(const LocalCallPtr& call, Status status) {
  if (failure_ && !status.ok()) {
    status.text = message_prefix(rank_, size()) +
                  describe_call(call->request.kind, call->request.name) + ": " + status.text;
  }
  --open_calls_;
  call->status = std::move(status);
  completed_.push_back(call);
}

Coordinator::Counters Progress::coordinator_counters() const {
  return coordinator_ == nullptr ? Coordinator::Counters{} : coordinator_->counters();
}

}  // namespace horovod
