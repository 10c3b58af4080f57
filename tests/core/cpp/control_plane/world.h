// A simulated job: ranks, channels that delay and reorder between ranks but not within one, one
// coordinator and a clock that is made up. The order of events is a function of the seed.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/coordinator.h"
#include "oracle.h"
#include "program.h"
#include "rank.h"

namespace horovod::sim {

enum class Ending { Clean, Errors, Deadlock, Stall, PeerLost };
inline constexpr std::array<std::string_view, 5> kEndings{
    "every call completed", "errors named, every rank ended", "deadlock named",
    "stall ended on request", "peer lost"};

class World {
 public:
  // `trace` gets a line for each event.
  World(uint64_t seed, std::function<void(const std::string&)> trace = {})
      : trace_(std::move(trace)),
        rng_(seed ^ 0x5DEECE66Dull),
        job_(make_job(seed)),
        coordinator_(job_.options),
        oracle_(job_.options) {
    for (int32_t rank = 0; rank < size(); ++rank) ranks_.emplace_back(rank, job_);
  }

  Ending run() {
    constexpr size_t kMostEvents = 100'000;
    for (size_t events = 0; events < kMostEvents; ++events) {
      if (std::optional<Ending> ending = ended(events)) return *ending;
      now_ += std::chrono::microseconds(below(rng_, 200));
      collect_events();
      if (events_.empty()) {
        let_time_pass();
      } else {
        happen(events_[below(rng_, events_.size())]);
      }
    }
    throw Broken("the job ends");
  }

  // A number that any difference in what was sent would change.
  uint64_t digest() const { return digest_; }
  size_t decisions() const { return decisions_; }

 private:
  struct Event {
    enum class What { Step, Up, Down, Run, Decide };
    What what;
    int32_t rank;
  };

  int32_t size() const { return static_cast<int32_t>(job_.options.names.size()); }
  SimRank& at(int32_t rank) { return ranks_[static_cast<size_t>(rank)]; }

  // ---- The end ----

  std::optional<Ending> ended(size_t events) {
    if (job_.dies >= 0 && events >= job_.dies_after && !at(job_.dies).ended())
      return lose(job_.dies);
    if (aborted_) {
      require(coordinator_.next_deadline() == TimePoint::max(), "nothing follows an abort");
    }
    for (const SimRank& rank : ranks_) {
      if (!rank.ended()) return std::nullopt;
    }
    if (aborted_) return abort_ending_;
    require(coordinator_.all_left(), "the coordinator knows that all have left");
    for (const SimRank& rank : ranks_) {
      if (rank.errors() > 0) return Ending::Errors;
    }
    return Ending::Clean;
  }

  // As the engines would: the stream of the dead rank is read to its end, then all are told.
  Ending lose(int32_t dead) {
    note("dies", dead);
    at(dead).die();
    while (!at(dead).up.empty()) deliver_up(dead);
    decide();
    const Status status{ErrorKind::PeerLost, "rank " + std::to_string(dead) + " died", dead};
    for (int32_t rank = 0; rank < size(); ++rank) {
      while (rank != dead && !at(rank).down.empty()) deliver_down(rank);
      if (!at(rank).ended()) at(rank).receive(Abort{status});
    }
    return Ending::PeerLost;
  }

  // ---- Events ----

  void collect_events() {
    events_.clear();
    for (int32_t rank = 0; rank < size(); ++rank) {
      SimRank& r = at(rank);
      const auto add = [&](bool possible, Event::What what) {
        if (possible) events_.push_back({what, rank});
      };
      add(!r.ended() && r.can_step(now_) && eager(rank), Event::What::Step);
      add(!r.up.empty() && eager(rank), Event::What::Up);
      add(!r.down.empty() && r.state() != SimRank::State::Aborted && eager(rank),
          Event::What::Down);
      add(can_run(rank), Event::What::Run);
    }
    if (heard_ || events_.empty()) events_.push_back({Event::What::Decide, 0});
    if (events_.size() == 1 && !heard_ && events_[0].what == Event::What::Decide) {
      if (!anything_possible()) events_.clear();
    }
  }

  // Slow ranks do something only now and then.
  bool eager(int32_t rank) { return percent(rng_, job_.speed[static_cast<size_t>(rank)]); }

  bool anything_possible() {
    for (int32_t rank = 0; rank < size(); ++rank) {
      SimRank& r = at(rank);
      if (!r.ended() && (r.can_step(now_) || can_run(rank))) return true;
      if (!r.up.empty() || (!r.down.empty() && r.state() != SimRank::State::Aborted)) return true;
    }
    return false;
  }

  // An entry that moves data ends once all its contributors have started it.
  bool can_run(int32_t rank) {
    SimRank& r = at(rank);
    if (r.ended() || r.queue.empty()) return false;
    if (!r.started) return true;
    const Entry& entry = r.queue.front();
    return !r.first_moves_data() || starts_[entry.seq] == entry.contributors.size();
  }

  void happen(const Event& event) {
    switch (event.what) {
      case Event::What::Step:
        if (trace_) note("goes on", event.rank);
        jumped_ = false;
        return at(event.rank).step(now_);
      case Event::What::Up:
        return deliver_up(event.rank);
      case Event::What::Down:
        return deliver_down(event.rank);
      case Event::What::Run:
        return run_entry(event.rank);
      case Event::What::Decide:
        return decide();
    }
  }

  void deliver_up(int32_t rank) {
    Frame frame = take(at(rank).up);
    require(frame.rank == rank, "a frame names its rank");
    const bool cached = std::holds_alternative<AnnounceCached>(frame.message);
    // An answer is no sign that the program goes on.
    jumped_ = jumped_ && std::holds_alternative<Located>(frame.message);
    std::visit(
        [&](auto&& message) {
          if constexpr (std::is_constructible_v<Item, decltype(std::move(message))>) {
            Item item(std::move(message));
            if (trace_) note("is heard: " + describe(item), rank);
            oracle_.heard(rank, item, now_);
            coordinator_.receive(rank, std::move(item), now_);
          } else {
            throw Broken("ranks send items only");
          }
        },
        std::move(frame.message));
    heard_ = true;
    if (cached) decide();  // the oracle can't know which ids were given up
  }

  void deliver_down(int32_t rank) {
    const Frame frame = take(at(rank).down);
    require(frame.rank == rank, "a frame names its rank");
    at(rank).receive(frame.message);
  }

  static Frame take(std::deque<std::string>& channel) {
    const std::string text = std::move(channel.front());
    channel.pop_front();
    std::span<const std::byte> bytes = std::as_bytes(std::span(text.data(), text.size()));
    Frame frame;
    require(decode(bytes, frame) && bytes.empty(), "a frame is decoded as a whole");
    return frame;
  }

  void run_entry(int32_t rank) {
    SimRank& r = at(rank);
    const uint64_t seq = r.queue.front().seq;
    const bool reports = r.first_moves_data() && r.queue.front().contributors.front() == rank;
    if (!r.started) {
      r.started = true;
      ++starts_[seq];
      return;
    }
    if (trace_) note("ends entry " + std::to_string(seq), rank);
    r.complete();
    if (reports) {
      r.up.emplace_back();
      encode(Done{seq}, rank, r.up.back());
    }
  }

  void decide() {
    heard_ = false;
    std::vector<Outgoing> out;
    std::vector<LogLine> log;
    coordinator_.decide(now_, out, log);
    require(coordinator_.next_deadline() > now_, "what is due is decided");
    for (const LogLine& line : log) {
      note(line.text, -1);
      if (line.level == 30 && line.text.find("Missing: rank") != std::string::npos)
        ++oracle_.warnings;
    }
    for (const Outgoing& outgoing : out) {
      ++decisions_;
      if (trace_) note("decided: " + describe(outgoing), -1);
      if (const auto* abort = std::get_if<Abort>(&outgoing.decision)) check_abort(*abort);
      oracle_.emitted(outgoing);
      for (int32_t rank : outgoing.to) send_down(rank, outgoing.decision);
    }
  }

  void send_down(int32_t rank, const Decision& decision) {
    std::deque<std::string>& down = at(rank).down;
    down.emplace_back();
    std::visit([&](const auto& d) { encode(d, rank, down.back()); }, decision);
    for (char c : down.back())
      digest_ = (digest_ ^ static_cast<unsigned char>(c)) * 0x100000001B3ull;
  }

  void check_abort(const Abort& abort) {
    require(!aborted_, "a job is ended once");
    require(abort.status.kind == ErrorKind::Timeout, "a job ends for a time-out");
    require(abort.status.text.find("rank") != std::string::npos, "who is missing is named");
    aborted_ = true;
    if (abort.status.text.find("deadlock") != std::string::npos) {
      require(jumped_ && oracle_.everyone_is_blocked(), "a deadlock is one");
      abort_ending_ = Ending::Deadlock;
    } else {
      require(oracle_.waits_since() + job_.options.stall_shutdown <= now_, "a stall is one");
      abort_ending_ = Ending::Stall;
    }
  }

  // Nobody can do anything: the clock jumps to what the coordinator or a sleeping rank waits for.
  void let_time_pass() {
    oracle_.idle(now_);
    TimePoint wakes = TimePoint::max();
    for (const SimRank& rank : ranks_) wakes = std::min(wakes, rank.wakes());
    const TimePoint next = coordinator_.next_deadline();
    require(std::min(next, wakes) != TimePoint::max(), "nobody waits for ever");
    note("time passes", -1);
    now_ = std::max(now_, std::min(next, wakes));
    jumped_ = true;
    decide();
  }

  // ---- Trace ----

  void note(const std::string& what, int32_t rank) const {
    if (!trace_) return;  // checked by frequent callers before they make a text
    const double ms = std::chrono::duration<double, std::milli>(now_ - kStart).count();
    trace_(std::to_string(ms) + " ms  " +
           (rank < 0 ? "coordinator: " : "rank " + std::to_string(rank) + " ") + what);
  }

  static std::string describe(const Item& item) {
    if (const auto* a = std::get_if<Announce>(&item)) {
      return std::string(info(a->request.kind).name) + " \"" + a->request.name + "\" of set " +
             std::to_string(a->request.set) + (a->blocked ? ", blocked" : "");
    }
    if (const auto* a = std::get_if<AnnounceCached>(&item)) {
      return "id " + std::to_string(a->id) + (a->blocked ? ", blocked" : "");
    }
    if (const auto* b = std::get_if<Blocked>(&item))
      return "blocked on \"" + b->name + "\" of set " + std::to_string(b->set);
    if (const auto* r = std::get_if<Reject>(&item))
      return "reject \"" + r->name + "\" of set " + std::to_string(r->set);
    if (const auto* d = std::get_if<Done>(&item)) return "done " + std::to_string(d->seq);
    if (const auto* l = std::get_if<Located>(&item))
      return "answer " + std::to_string(l->id) + ": \"" + l->name + "\" " + l->site;
    return "leave";
  }

  static std::string describe(const Outgoing& outgoing) {
    std::string to = " to";
    for (int32_t rank : outgoing.to) to += " " + std::to_string(rank);
    if (const auto* r = std::get_if<Resend>(&outgoing.decision))
      return "resend " + std::to_string(r->id) + to;
    if (const auto* l = std::get_if<Locate>(&outgoing.decision))
      return "locate " + std::to_string(l->id) + to + ": \"" + l->name + "\"";
    if (const auto* a = std::get_if<Abort>(&outgoing.decision))
      return "abort" + to + ": " + a->status.text;
    const Entry& entry = std::get<Entry>(outgoing.decision);
    std::string text = "entry " + std::to_string(entry.seq) + " " +
                       std::string(info(entry.kind).name) + " of set " + std::to_string(entry.set) +
                       to + ":";
    for (const EntryItem& item : entry.items)
      text += " \"" + item.name + "\"/" + std::to_string(item.id);
    return text + " " + entry.status.text;
  }

  static constexpr TimePoint kStart{std::chrono::hours(1)};

  std::function<void(const std::string&)> trace_;
  Rng rng_;
  const Job job_;
  TimePoint now_ = kStart;
  Coordinator coordinator_;
  Oracle oracle_;
  std::deque<SimRank> ranks_;
  std::vector<Event> events_;
  std::map<uint64_t, size_t> starts_;  // by entry: contributors that started it
  bool heard_ = false;                 // something since the last decision
  bool jumped_ = false;
  bool aborted_ = false;
  Ending abort_ending_ = Ending::Deadlock;
  uint64_t digest_ = 0xCBF29CE484222325ull;
  size_t decisions_ = 0;
};

}  // namespace horovod::sim
