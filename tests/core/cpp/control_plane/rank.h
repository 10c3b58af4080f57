// A simulated rank: runs its script against the coordinator as an engine would, with the
// engine's own announcer and real frames, and complains about every decision that doesn't concern
// it.
#pragma once

#include <deque>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/announcer.h"
#include "program.h"

namespace horovod::sim {

// A law does not hold.
class Broken : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void require(bool holds, const char* law) {
  if (!holds) throw Broken(law);
}
inline void require(bool holds, const std::string& law) { require(holds, law.c_str()); }

class SimRank {
 public:
  enum class State { Running, Waiting, Leaving, Gone, Dead, Aborted };

  SimRank(int32_t rank, const Job& job)
      : rank_(rank),
        script_(job.scripts[static_cast<size_t>(rank)]),
        plan_hash_(job.options.plan_hash),
        announcer_(job.options.cache_capacity) {
    uids_[0] = 0;
  }

  // Channels: first in, first out, of encoded frames.
  std::deque<std::string> up, down;
  // Entries to run, in order; an entry is started when it is the first.
  std::deque<Entry> queue;
  bool started = false;

  State state() const { return state_; }
  bool ended() const {
    return state_ == State::Gone || state_ == State::Dead || state_ == State::Aborted;
  }
  bool stands_still() const { return state_ == State::Waiting && pending_.contains(waits_for_); }
  bool can_step(TimePoint now) const {
    if (state_ == State::Running) return now >= wakes_;
    return state_ == State::Waiting && !stands_still();
  }
  // When a rank that sleeps goes on.
  TimePoint wakes() const { return state_ == State::Running ? wakes_ : TimePoint::max(); }
  size_t errors() const { return errors_; }
  void die() { state_ = State::Dead; }

  // The next line of the script.
  void step(TimePoint now) {
    state_ = State::Running;
    if (ends_) return leave("an error ended the script");
    const Step& step = script_[next_++];
    if (step.what == Step::Do::Leave) return leave(step.request.name);
    if (step.what == Step::Do::Sleep) {
      wakes_ = now + step.sleep;
      return;
    }
    const auto uid = uids_.find(step.set);
    if (uid == uids_.end()) return;
    Request request = step.request;
    request.set = uid->second;
    const Key key{request.set, request.name};
    switch (step.what) {
      case Step::Do::Submit:
        return submit(step, std::move(request), key);
      case Step::Do::Reject:
        return say(Reject{request.kind, request.set, request.name, "it is wrong"});
      case Step::Do::Wait:
        return wait(key);
      case Step::Do::Sleep:
      case Step::Do::Leave:
        break;
    }
  }

  void receive(const Message& message) {
    require(state_ != State::Gone, "nothing follows the acknowledgement");
    if (const auto* entry = std::get_if<Entry>(&message)) return accept(*entry);
    if (const auto* resend = std::get_if<Resend>(&message)) return announce_again(resend->id);
    if (const auto* question = std::get_if<Locate>(&message)) return answer(*question);
    const auto* abort = std::get_if<Abort>(&message);
    require(abort != nullptr, "a rank gets decisions only");
    require(!abort->status.ok() && !abort->status.text.empty(), "an abort says why");
    end_all(State::Aborted);
  }

  // The first entry of the queue is complete here.
  void complete() {
    const Entry entry = std::move(queue.front());
    queue.pop_front();
    started = false;
    if (entry.kind == OpKind::Shutdown) {
      require(queue.empty(), "the acknowledgement is the last entry");
      return end_all(State::Gone);
    }
    for (const EntryItem& item : entry.items) {
      const auto it = pending_.find(Key{entry.set, item.name});
      require(it != pending_.end(), "an entry is for a pending call");
      if (entry.status.ok()) apply(entry, it->second);
      pending_.erase(it);
    }
    if (!entry.status.ok()) {
      ++errors_;
      require(!entry.status.text.empty(), "an error has a text");
      // Someone left: this script can't go on.
      ends_ = ends_ || entry.status.kind == ErrorKind::Shutdown;
    }
  }

  // Whether the data of the entry that comes first has to move, so that it needs all contributors.
  bool first_moves_data() const {
    const Entry& entry = queue.front();
    return entry.status.ok() && info(entry.kind).moves_data && entry.terms.empty();
  }

 private:
  using Key = std::pair<uint32_t, std::string>;
  struct Pending {
    Request request;
    size_t adds = 0;
  };

  void say(const Message& message) {
    up.emplace_back();
    encode(message, rank_, up.back());
  }
  void say_item(const Item& item) {
    std::visit([this](const auto& it) { say(it); }, item);
  }

  void submit(const Step& step, Request request, const Key& key) {
    if (pending_.contains(key)) return;  // a ValueError here, and nobody hears of it
    if (request.kind == OpKind::RemoveSet) {
      const auto removed = uids_.find(static_cast<size_t>(request.root));
      if (removed == uids_.end()) return;
      request.root = static_cast<int32_t>(removed->second);
    }
    Pending& pending = pending_[key];
    pending.request = std::move(request);
    pending.adds = step.adds;
    last_name_ = key.second;
    say_item(announcer_.announce(key, pending.request, step.sync, payload(step, pending.request)));
    if (step.sync) stop(key);
  }

  // Of as many bytes on every rank that sends one for this call, and different each time. Who
  // doesn't wait sends some too, so that entries of several calls carry terms.
  std::string payload(const Step& step, const Request& request) {
    if (request.kind != OpKind::Allreduce) return {};
    if (!step.sync && request.name.back() % 2 == 0) return {};
    uint64_t bytes = 0;
    for (const TensorSpec& tensor : request.tensors) {
      bytes += count_of(tensor.shape) * info(tensor.dtype).size;
    }
    if (bytes > kMostPayload) return {};
    std::string text = std::to_string(rank_) + "." + std::to_string(++payloads_);
    text.resize(bytes, ' ');
    return text;
  }

  void wait(const Key& key) {
    if (!pending_.contains(key)) return;
    if (const auto item = announcer_.block(key.first, key.second)) say_item(*item);
    stop(key);
  }

  void stop(const Key& key) {
    state_ = State::Waiting;
    waits_for_ = key;
  }

  void leave(const std::string& text) {
    say(Leave{text});
    state_ = State::Leaving;
  }

  void end_all(State state) {
    state_ = state;
    pending_.clear();
  }

  void accept(Entry entry) {
    require(entry.seq > last_seq_, "entries come in order");
    last_seq_ = entry.seq;
    require(entry.plan_hash == plan_hash_, "an entry carries the plan's hash");
    require(std::find(entry.contributors.begin(), entry.contributors.end(), rank_) !=
                entry.contributors.end(),
            "an entry goes to contributors only");
    const std::vector<Key> calls = accept_calls(entry);
    for (size_t i = 0; i < calls.size(); ++i) {
      require(pending_.contains(calls[i]), "an entry is for a pending call");
      entry.items[i].name = calls[i].second;
    }
    queue.push_back(std::move(entry));
  }

  std::vector<Key> accept_calls(const Entry& entry) {
    try {
      return announcer_.take(entry);
    } catch (const Error& error) {
      throw Broken(error.what());
    }
  }

  void announce_again(uint64_t id) {
    if (state_ == State::Leaving) return;
    try {
      say_item(announcer_.again(id));
    } catch (const Error& error) {
      throw Broken(error.what());
    }
  }

  // Whatever the rank is doing; every third is silent, and every other knows its program.
  void answer(const Locate& question) {
    if (state_ == State::Leaving || rank_ % 3 == 2) return;
    const Key* call = announcer_.find_call(question.set, question.name);
    require((call != nullptr) == pending_.contains(Key{question.set, question.name}),
            "an open call is found by its name");
    const std::string& name = call == nullptr ? last_name_ : question.name;
    say(Located{question.id, name, rank_ % 2 == 1 ? "at " + name : ""});
  }

  void apply(const Entry& entry, const Pending& pending) {
    if (entry.kind == OpKind::AddSet) {
      require(entry.ranks == pending.request.ranks, "an added set has the ranks asked for");
      uids_[pending.adds] = static_cast<uint32_t>(entry.value);
    } else if (entry.kind == OpKind::RemoveSet) {
      const auto uid = static_cast<uint32_t>(entry.value);
      std::erase_if(uids_, [&](const auto& known) { return known.second == uid; });
      announcer_.forget_set(uid);
    }
  }

  static constexpr uint64_t kMostPayload = 64;

  int32_t rank_;
  const Script& script_;
  uint64_t plan_hash_;
  size_t next_ = 0;
  State state_ = State::Running;
  bool ends_ = false;
  TimePoint wakes_;
  Key waits_for_;
  std::map<Key, Pending> pending_;
  std::map<size_t, uint32_t> uids_;  // by number of the set
  Announcer<Key> announcer_;
  uint64_t last_seq_ = 0;
  std::string last_name_;
  size_t errors_ = 0;
  size_t payloads_ = 0;
};

}  // namespace horovod::sim
