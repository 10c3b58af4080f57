// What the coordinator may and must decide, written a second time from its rules: rounds of
// utterances instead of counters. Every item it hears and every decision it makes passes here.
#pragma once

#include <algorithm>
#include <bit>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/coordinator.h"
#include "rank.h"

namespace horovod::sim {

// Whether two calls ask for the same thing.
inline bool agree(const Request& a, const Request& b) {
  const auto bits = [](double value) { return std::bit_cast<uint64_t>(value); };
  const OpInfo& op = info(a.kind);
  return a.kind == b.kind && a.tensors == b.tensors &&
         (!op.reduces || (a.op == b.op && bits(a.prescale) == bits(b.prescale) &&
                          bits(a.postscale) == bits(b.postscale))) &&
         (!op.rooted || a.root == b.root) && (a.kind != OpKind::AddSet || a.ranks == b.ranks) &&
         (a.kind != OpKind::RemoveSet || a.root == b.root);
}

class Oracle {
 public:
  explicit Oracle(const CoordinatorOptions& options)
      : options_(options),
        limit_(std::min(options.fusion_threshold_bytes, options.max_entry_bytes)),
        left_(options.names.size()),
        joined_(options.names.size()),
        acknowledged_(options.names.size()) {
    Ranks all;
    for (size_t rank = 0; rank < options.names.size(); ++rank)
      all.push_back(static_cast<int32_t>(rank));
    sets_[0] = all;
  }

  // ---- What the coordinator hears ----

  void heard(int32_t rank, const Item& item, TimePoint now) {
    if (const auto* done = std::get_if<Done>(&item)) return heard_done(rank, *done);
    require(!left_[place(rank)], "nothing but Done follows Leave");
    if (const auto* announce = std::get_if<Announce>(&item)) {
      return heard_in_full(rank, *announce, now);
    }
    if (const auto* cached = std::get_if<AnnounceCached>(&item)) {
      require(ids_.contains(cached->id), "an announced id was in an entry");
      return utter(rank,
                   {ids_.at(cached->id), cached->id, false, cached->blocked, now, cached->payload});
    }
    if (const auto* reject = std::get_if<Reject>(&item)) {
      Utterance u;
      u.request.kind = reject->kind;
      u.request.set = reject->set;
      u.request.name = reject->name;
      u.rejected = true;
      u.since = now;
      const auto set = sets_.find(reject->set);
      if (set != sets_.end() && !has_left(set->second)) utter(rank, std::move(u));
      return;
    }
    if (const auto* blocked = std::get_if<Blocked>(&item)) {
      const auto call = calls_.find({blocked->set, blocked->name});
      if (call != calls_.end() && !call->second[rank].empty())
        call->second[rank].back().blocked = true;
      return;
    }
    if (std::holds_alternative<Located>(item)) return;
    left_[place(rank)] = true;
    owed_[rank].clear();
    late_[rank].clear();
    for (auto& [key, voices] : calls_) {
      const auto set = sets_.find(key.first);
      if (set != sets_.end() && !complete(set->second, voices)) end_rejections(set->second, voices);
      if (any_join(voices)) all_return_from_join(voices);
    }
  }

  // ---- What it decides ----

  void emitted(const Outgoing& outgoing) {
    if (const auto* resend = std::get_if<Resend>(&outgoing.decision)) {
      require(outgoing.to.size() == 1, "one rank is asked again");
      return forget(outgoing.to[0], resend->id);
    }
    if (const auto* entry = std::get_if<Entry>(&outgoing.decision)) {
      require(outgoing.to == entry->contributors, "an entry goes to its contributors");
      return emitted_entry(*entry);
    }
    if (const auto* question = std::get_if<Locate>(&outgoing.decision)) {
      require(outgoing.to.size() == 1 && question->id > last_question_, "a question is one rank's");
      last_question_ = question->id;
      require(!left_[place(outgoing.to[0])], "who left isn't asked");
    }
  }

  // Nothing is on its way and nobody can do anything: what is still open has to wait for a rank
  // that could come, or for time.
  void idle(TimePoint now) const {
    require(reporters_.empty(), "entries end");
    for (const auto& [rank, ids] : owed_) require(ids.empty(), "what was asked for in full came");
    for (const auto& [key, voices] : calls_) {
      const auto set = sets_.find(key.first);
      if (set != sets_.end() && complete(set->second, voices)) {
        require(info(first_request(voices).kind).fuses && may_wait(set->second, voices),
                "\"" + key.second + "\" is complete and isn't run");
        continue;
      }
      for (const auto& [rank, said] : voices) {
        if (said.empty() || said.front().rejected || left_[place(rank)]) continue;
        const std::string what = "\"" + key.second + "\" of rank " + std::to_string(rank);
        require(set != sets_.end(), what + " waits in a removed set");
        require(!has_left(set->second), what + " waits for a rank that left");
      }
    }
    if (options_.stall_warning > Duration{} &&
        waits_since() + options_.stall_warning + options_.answers <= now) {
      require(warnings > 0, "who waits for long is told for whom");
    }
  }

  // A rank goes with calls that nobody will run.
  void withdrawn(int32_t rank) {
    for (auto& [key, voices] : calls_) voices[rank].clear();
  }

  bool everyone_is_blocked() const {
    for (size_t rank = 0; rank < left_.size(); ++rank) {
      if (!left_[rank] && !joined_[rank] && !is_blocked(static_cast<int32_t>(rank))) return false;
    }
    return true;
  }

  // Since when somebody waits; far in the future if nobody does.
  TimePoint waits_since() const {
    TimePoint since{TimePoint::max().time_since_epoch() / 2};
    for (const auto& [key, voices] : calls_) {
      for (const auto& [rank, said] : voices) {
        if (!said.empty() && !left_[place(rank)]) since = std::min(since, said.front().since);
      }
    }
    return since;
  }

  size_t warnings = 0;

 private:
  struct Utterance {
    Request request;
    uint64_t id = 0;
    bool rejected = false;
    bool blocked = false;
    TimePoint since;
    std::string payload;
  };
  using Key = std::pair<uint32_t, std::string>;
  // By rank, what it said under a name and got no entry for; the first of each is this round.
  struct Voices : std::map<int32_t, std::deque<Utterance>> {
    std::set<int32_t> excused;  // had joined when all the others had spoken
  };

  static size_t place(int32_t rank) { return static_cast<size_t>(rank); }

  bool has_left(const Ranks& members) const {
    return std::any_of(members.begin(), members.end(), [&](int32_t r) { return left_[place(r)]; });
  }

  static const Utterance* front(const Voices& voices, int32_t rank) {
    const auto it = voices.find(rank);
    if (it == voices.end() || it->second.empty() || voices.excused.contains(rank)) return nullptr;
    return &it->second.front();
  }

  static const Request& first_request(const Voices& voices) {
    for (const auto& [rank, said] : voices) {
      const Utterance* first = front(voices, rank);
      if (first != nullptr && !first->rejected) return first->request;
    }
    throw Broken("somebody announced it");
  }

  // All members have spoken or are excused; somebody announced it.
  bool complete(const Ranks& members, const Voices& voices) const {
    return over(members, voices) && std::any_of(members.begin(), members.end(), [&](int32_t rank) {
             return front(voices, rank) != nullptr && !front(voices, rank)->rejected;
           });
  }

  // All members have spoken or are excused.
  bool over(const Ranks& members, const Voices& voices) const {
    bool any = false;
    for (int32_t rank : members) {
      const bool spoke = front(voices, rank) != nullptr;
      if (!spoke && (any_join(voices) || !is_excused(voices, rank))) return false;
      any = any || spoke;
    }
    return any;
  }

  bool is_excused(const Voices& voices, int32_t rank) const {
    return joined_[place(rank)] || voices.excused.contains(rank);
  }

  static bool any_join(const Voices& voices) {
    return std::any_of(voices.begin(), voices.end(), [&](const auto& voice) {
      const Utterance* first = front(voices, voice.first);
      return first != nullptr && first->request.kind == OpKind::Join;
    });
  }

  bool is_blocked(int32_t rank) const {
    for (const auto& [key, voices] : calls_) {
      const auto it = voices.find(rank);
      if (it == voices.end()) continue;
      for (const Utterance& said : it->second) {
        if (said.blocked && !said.rejected) return true;
      }
    }
    return false;
  }

  // Whether a complete call may wait for company.
  bool may_wait(const Ranks& members, const Voices& voices) const {
    if (options_.min_cycle > Duration{}) return true;
    return std::none_of(members.begin(), members.end(), [&](int32_t rank) {
      return front(voices, rank) != nullptr && (left_[place(rank)] || is_blocked(rank));
    });
  }

  void utter(int32_t rank, Utterance u) {
    const Key key{u.request.set, u.request.name};
    const bool is_join = u.request.kind == OpKind::Join;
    if (is_join && !u.rejected && !has_left(sets_.at(0))) {
      joined_[place(rank)] = true;
      last_joined_ = rank;
    }
    calls_[key][rank].push_back(std::move(u));
    if (is_join && complete(sets_.at(0), calls_[key])) all_return_from_join(calls_[key]);
    for (auto& [other, voices] : calls_) {
      if (is_join || other == key) drop_rejected(other, voices);
    }
  }

  // A round in which all have rejected ends without an entry.
  void drop_rejected(const Key& key, Voices& voices) {
    const auto set = sets_.find(key.first);
    if (set == sets_.end()) return;
    while (over(set->second, voices) && !complete(set->second, voices)) {
      for (int32_t rank : set->second) {
        if (front(voices, rank) != nullptr) voices[rank].pop_front();
      }
      voices.excused.clear();
    }
  }

  // A set with a member that left has no rounds any more.
  void end_rejections(const Ranks& members, Voices& voices) const {
    if (!has_left(members)) return;
    for (auto& [rank, said] : voices) {
      std::erase_if(said, [](const Utterance& u) { return u.rejected; });
    }
  }

  void forget(int32_t rank, uint64_t id) {
    for (auto& [key, voices] : calls_) {
      std::deque<Utterance>& said = voices[rank];
      if (said.empty() || said.back().id != id || said.back().rejected) continue;
      said.pop_back();
      owed_[rank].insert(id);
      if (const auto set = sets_.find(key.first); set != sets_.end()) {
        end_rejections(set->second, voices);
      }
      return drop_rejected(key, voices);
    }
    throw Broken("only an id that was announced is asked for in full");
  }

  // What concerns all ranks doesn't overtake calls that were asked for again.
  void heard_in_full(int32_t rank, const Announce& announce, TimePoint now) {
    const Utterance said{announce.request, 0, false, announce.blocked, now, announce.payload};
    const bool for_all = announce.request.kind == OpKind::Join ||
                         announce.request.kind == OpKind::AddSet ||
                         announce.request.kind == OpKind::RemoveSet;
    if (for_all && !owed_[rank].empty()) {
      late_[rank].push_back(said);
      return;
    }
    owed_[rank].erase(announce.resends);
    utter(rank, said);
    if (!owed_[rank].empty()) return;
    for (const Utterance& next : late_[rank]) utter(rank, next);
    late_[rank].clear();
  }

  void heard_done(int32_t rank, const Done& done) {
    const auto it = reporters_.find(done.seq);
    if (it == reporters_.end()) return;
    require(it->second.rank == rank, "the lowest contributor reports the end of an entry");
    --in_flight_[it->second.set];
    reporters_.erase(it);
  }

  void emitted_entry(const Entry& entry) {
    require(entry.seq == ++last_seq_, "every entry has the next number");
    require(!entry.contributors.empty(), "an entry has contributors");
    for (size_t i = 0; i < entry.contributors.size(); ++i) {
      require(i == 0 || entry.contributors[i - 1] < entry.contributors[i], "contributors ascend");
      require(!acknowledged_[place(entry.contributors[i])], "nothing follows the acknowledgement");
    }
    if (entry.kind == OpKind::Shutdown && entry.status.ok()) return emitted_end(entry);
    if (!entry.status.ok()) return emitted_error(entry);
    emitted_good(entry);
  }

  void emitted_end(const Entry& entry) {
    const int32_t rank = entry.contributors.front();
    require(entry.contributors.size() == 1 && left_[place(rank)], "who left is let go");
    for (auto& [key, voices] : calls_) {
      const auto set = sets_.find(key.first);
      require(front(voices, rank) == nullptr || set == sets_.end() ||
                  front(voices, rank)->rejected || !everyone_announced(set->second, voices),
              "what was agreed on comes before the acknowledgement");
      voices[rank].clear();
    }
    acknowledged_[place(rank)] = true;
    for (const auto& [seq, reporter] : reporters_) {
      require(reporter.rank != rank, "who has to report isn't let go");
    }
  }

  static bool everyone_announced(const Ranks& members, const Voices& voices) {
    return std::all_of(members.begin(), members.end(), [&](int32_t rank) {
      const Utterance* said = front(voices, rank);
      return said != nullptr && !said->rejected;
    });
  }

  // ---- Errors ----

  void emitted_error(const Entry& entry) {
    require(entry.items.size() == 1 && entry.items[0].id == 0 && !entry.items[0].name.empty(),
            "an error is about one call, by name");
    const Key key{entry.set, entry.items[0].name};
    const std::string what = "error entry for \"" + key.second + "\" (" + entry.status.text + "): ";
    require(calls_.contains(key), what + "nobody called it");
    require(entry.status.text.find(key.second) != std::string::npos, what + "names the call");
    Voices& voices = calls_[key];
    for (int32_t rank : entry.contributors) {
      require(front(voices, rank) != nullptr && !front(voices, rank)->rejected,
              what + "goes to those who announced it");
    }
    const auto set = sets_.find(entry.set);
    if (set == sets_.end()) {
      require(entry.contributors.size() == 1, what + "answers one rank");
    } else if (entry.status.kind == ErrorKind::Shutdown) {
      require(has_left(set->second) && left_[place(entry.status.rank)],
              what + "blames who has left");
      require(
          std::count(entry.contributors.begin(), entry.contributors.end(), entry.status.rank) == 0,
          what + "isn't for the one that left");
    } else if (!being_removed(entry.set)) {
      require(complete(set->second, voices), what + "comes once all have spoken");
      for (const auto& [rank, said] : voices) {
        require(front(voices, rank) == nullptr || said.front().rejected ||
                    std::count(entry.contributors.begin(), entry.contributors.end(), rank) == 1,
                what + "goes to all who announced it");
      }
      check_cause(what, set->second, voices, entry.status);
      for (int32_t rank : set->second) {
        if (front(voices, rank) != nullptr && front(voices, rank)->rejected)
          voices[rank].pop_front();
      }
    }
    end_round(voices, entry.contributors);
    drop_rejected(key, voices);
  }

  // The round ends for these ranks.
  void end_round(Voices& voices, const Ranks& contributors) {
    for (int32_t rank : contributors) {
      voices[rank].pop_front();
    }
    voices.excused.clear();
  }

  // What becomes complete later on needs them again.
  void all_return_from_join(const Voices& join) {
    for (const auto& [rank, said] : join) {
      const Utterance* first = front(join, rank);
      if (first != nullptr && first->request.kind == OpKind::Join && !first->rejected) {
        return_from_join(rank);
      }
    }
  }

  void return_from_join(int32_t rank) {
    if (!joined_[place(rank)]) return;
    for (auto& [key, voices] : calls_) {
      const auto set = sets_.find(key.first);
      if (set != sets_.end() && front(voices, rank) == nullptr && over(set->second, voices)) {
        voices.excused.insert(rank);
      }
    }
    joined_[place(rank)] = false;
  }

  bool being_removed(uint32_t uid) const {
    return std::any_of(calls_.begin(), calls_.end(), [&](const auto& call) {
      const Utterance* said = front(call.second, 0);
      return said != nullptr && said->request.kind == OpKind::RemoveSet &&
             said->request.root == static_cast<int32_t>(uid) &&
             everyone_announced(sets_.at(0), call.second);
    });
  }

  void check_cause(const std::string& what, const Ranks& members, const Voices& voices,
                   const Status& status) const {
    const Request& first = first_request(voices);
    bool mismatch = false;
    for (int32_t rank : members) {
      const Utterance* said = front(voices, rank);
      if (said == nullptr) {
        mismatch = mismatch || !leaves_out_joined(first) ||
                   (info(first.kind).rooted && first.root == rank);
      } else {
        mismatch =
            mismatch || said->rejected || !agree(first, said->request) || lacks_rows(said->request);
      }
    }
    if (mismatch) {
      require(status.kind == ErrorKind::Mismatch, what + "is a mismatch");
    } else {
      require(status.kind == ErrorKind::InvalidArgument && wrong_arguments(members, first),
              what + "has a cause");
    }
  }

  bool leaves_out_joined(const Request& request) const {
    return request.kind == OpKind::Allreduce || request.kind == OpKind::Barrier ||
           (options_.join_all_ops && info(request.kind).moves_data);
  }

  static bool lacks_rows(const Request& request) {
    if (request.kind == OpKind::Reducescatter) {
      return std::any_of(request.tensors.begin(), request.tensors.end(),
                         [](const TensorSpec& tensor) { return tensor.shape.empty(); });
    }
    return info(request.kind).own_rows && request.scalar;
  }

  bool wrong_arguments(const Ranks& members, const Request& request) const {
    if (request.kind == OpKind::RemoveSet) {
      return request.root == 0 || !sets_.contains(static_cast<uint32_t>(request.root));
    }
    if (request.kind == OpKind::AddSet) {
      const std::set<int32_t> unique(request.ranks.begin(), request.ranks.end());
      return unique.size() != request.ranks.size() || unique.empty() ||
             *unique.rbegin() >= static_cast<int32_t>(left_.size()) ||
             std::any_of(sets_.begin(), sets_.end(),
                         [&](const auto& set) { return set.second == request.ranks; });
    }
    return info(request.kind).rooted &&
           std::count(members.begin(), members.end(), request.root) == 0;
  }

  // ---- Entries that run ----

  // What the contributors of an entry sent with its calls.
  struct Terms : std::vector<std::string> {
    using vector::vector;
    bool complete = true;

    std::string carried(uint64_t most) const {
      std::string all;
      for (const std::string& payload : *this) all += payload;
      return complete && all.size() <= most ? all : "";
    }
  };

  static void collect(const Entry& entry, const Voices& voices, Terms& terms) {
    const size_t bytes = front(voices, entry.contributors.front())->payload.size();
    for (size_t i = 0; i < terms.size(); ++i) {
      const std::string& payload = front(voices, entry.contributors[i])->payload;
      terms.complete = terms.complete && bytes > 0 && payload.size() == bytes;
      terms[i] += payload;
    }
  }

  void emitted_good(const Entry& entry) {
    const auto set = sets_.find(entry.set);
    require(set != sets_.end(), "an entry is for a set that exists");
    require(!entry.items.empty(), "an entry has a call");
    std::vector<Request> requests;
    uint64_t bytes = 0;
    Terms terms(entry.contributors.size());
    for (const EntryItem& item : entry.items) {
      const Key key{entry.set, item.name.empty() && ids_.contains(item.id) ? ids_.at(item.id).name
                                                                           : item.name};
      const std::string what = "entry for \"" + key.second + "\": ";
      require(calls_.contains(key), what + "nobody called it");
      Voices& voices = calls_[key];
      requests.push_back(check_round(what, entry, set->second, voices));
      check_id(what, entry, item, requests.back(), voices);
      collect(entry, voices, terms);
      end_round(voices, entry.contributors);
      for (const TensorSpec& tensor : requests.back().tensors) {
        bytes += align_up(count_of(tensor.shape) * info(tensor.dtype).size);
      }
    }
    check_fusion(requests, bytes);
    require(entry.terms == terms.carried(options_.inline_bytes),
            "an entry carries the terms of all contributors in turn, or none");
    const uint32_t uid = entry.set;
    if (info(entry.kind).moves_data && entry.terms.empty()) {
      require(++in_flight_[uid] <= 2, "at most two entries of a set are in flight");
      reporters_[entry.seq] = {uid, entry.contributors.front()};
    }
    if (entry.kind == OpKind::Join)
      require(entry.value == last_joined_, "the last to join is named");
    if (entry.kind == OpKind::AddSet) added(entry);
    if (entry.kind == OpKind::RemoveSet) removed(entry, requests[0]);
  }

  Request check_round(const std::string& what, const Entry& entry, const Ranks& members,
                      const Voices& voices) const {
    const Utterance* first = front(voices, entry.contributors.front());
    require(first != nullptr, what + "a contributor called it");
    require(first->request.kind == entry.kind, what + "is of the kind that was called");
    size_t contributors = 0;
    for (int32_t rank : members) {
      const Utterance* said = front(voices, rank);
      if (std::count(entry.contributors.begin(), entry.contributors.end(), rank) == 0) {
        require(said == nullptr && is_excused(voices, rank) && leaves_out_joined(first->request),
                what + "only joined ranks are left out");
        require(!info(entry.kind).rooted || first->request.root != rank,
                what + "the root takes part");
        continue;
      }
      ++contributors;
      require(said != nullptr && !said->rejected, what + "a contributor called it");
      require(agree(first->request, said->request), what + "its contributors agree");
      require(!lacks_rows(said->request), what + "0-d tensors are refused");
    }
    require(contributors == entry.contributors.size(), what + "contributors are members");
    return first->request;
  }

  void check_id(const std::string& what, const Entry& entry, const EntryItem& item,
                const Request& request, const Voices& voices) {
    if (item.name.empty()) {
      for (int32_t rank : entry.contributors) {
        require(front(voices, rank)->id == item.id, what + "all who get no name announced the id");
      }
    }
    const bool cacheable =
        info(request.kind).moves_data && !request.unnamed && options_.cache_capacity > 0;
    require((item.id != 0) == cacheable, what + "named calls that move data have ids");
    if (item.id == 0) return;
    const auto [known, fresh] = ids_.try_emplace(item.id, request);
    if (fresh) {
      require(item.id > last_id_, what + "ids only grow");
      last_id_ = item.id;
    }
    require(known->second.name == request.name && known->second.set == request.set &&
                agree(known->second, request),
            what + "an id means one thing for ever");
  }

  void check_fusion(const std::vector<Request>& requests, uint64_t bytes) const {
    if (requests.size() == 1) return;
    require(bytes <= limit_, "an entry of several calls keeps to the limit");
    const auto bits = [](double value) { return std::bit_cast<uint64_t>(value); };
    for (const Request& r : requests) {
      require(info(r.kind).fuses && r.kind == requests[0].kind && r.op == requests[0].op &&
                  bits(r.prescale) == bits(requests[0].prescale) &&
                  bits(r.postscale) == bits(requests[0].postscale),
              "only equal work fuses");
      require(!options_.disable_group_fusion || r.tensors.size() == 1, "groups can be kept apart");
    }
  }

  void added(const Entry& entry) {
    const auto uid = static_cast<uint32_t>(entry.value);
    require(uid > last_uid_, "uids of sets only grow");
    last_uid_ = uid;
    for (const auto& [other, ranks] : sets_) require(ranks != entry.ranks, "sets are different");
    sets_[uid] = entry.ranks;
  }

  void removed(const Entry& entry, const Request& request) {
    const auto uid = static_cast<uint32_t>(entry.value);
    require(uid != 0 && static_cast<int32_t>(uid) == request.root && sets_.erase(uid) == 1,
            "the set asked for is removed");
    for (auto& [key, voices] : calls_) {
      if (key.first != uid) continue;
      for (auto& [rank, said] : voices) {
        require(said.empty() || said.front().rejected,
                "pending calls of a removed set fail before it");
        std::erase_if(said, [](const Utterance& u) { return u.rejected; });
      }
    }
  }

  const CoordinatorOptions& options_;
  uint64_t limit_;
  std::map<uint32_t, Ranks> sets_;
  std::map<Key, Voices> calls_;
  std::vector<bool> left_, joined_, acknowledged_;  // by rank
  std::map<int32_t, std::set<uint64_t>> owed_;      // by rank: ids asked for in full
  std::map<int32_t, std::vector<Utterance>> late_;
  int32_t last_joined_ = -1;
  std::map<uint64_t, Request> ids_;
  uint64_t last_id_ = 0;
  uint64_t last_seq_ = 0;
  uint64_t last_question_ = 0;
  uint32_t last_uid_ = 0;
  struct Reporter {
    uint32_t set;
    int32_t rank;
  };
  std::map<uint64_t, Reporter> reporters_;  // by number of the entry in flight
  std::map<uint32_t, size_t> in_flight_;    // by set
};

}  // namespace horovod::sim
