// Random programs of a simulated job: what each rank's script calls, in which order, and what goes
// wrong in it. Knows nothing of how calls are carried out.
#pragma once

#include <algorithm>
#include <chrono>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/coordinator.h"

namespace horovod::sim {

using Rng = std::mt19937_64;
using Ranks = std::vector<int32_t>;

inline uint64_t below(Rng& rng, uint64_t n) { return rng() % n; }
inline bool percent(Rng& rng, uint64_t n) { return below(rng, 100) < n; }

template <class T>
const T& one_of(Rng& rng, const std::vector<T>& values) {
  return values[below(rng, values.size())];
}

// One line of a rank's script. Sets are numbered by the call that adds them; their uids come at run
// time, and a step whose set was never added is skipped.
struct Step {
  enum class Do { Submit, Reject, Wait, Sleep, Leave };

  Do what = Do::Submit;
  size_t set = 0;
  size_t adds = 0;    // AddSet: the number of the new set
  Request request;    // RemoveSet: `root` is the number of the set
  bool sync = false;  // Submit: wait at once
  std::chrono::seconds sleep{};
};

using Script = std::vector<Step>;

struct Job {
  CoordinatorOptions options;
  std::vector<Script> scripts;  // by rank
  int32_t dies = -1;            // rank
  size_t dies_after = 0;        // events of the world
  std::vector<uint64_t> speed;  // by rank, in percent
};

class Generator {
 public:
  explicit Generator(uint64_t seed) : rng_(seed) {}

  Job make() {
    size_ = static_cast<int32_t>(1 + below(rng_, 6));
    job_.scripts.resize(static_cast<size_t>(size_));
    pending_.resize(static_cast<size_t>(size_));
    sets_.push_back({0, all()});
    choose_options();
    for (uint64_t rounds = 2 + below(rng_, 7); rounds > 0; --rounds) add_round();
    finish();
    return std::move(job_);
  }

 private:
  struct SetPlan {
    size_t number;
    Ranks members;
  };
  using Key = std::pair<size_t, std::string>;
  enum class Fault { None, Change, Reject, RejectAndRetry, RejectEverywhere, Skip };

  Ranks all() const {
    Ranks ranks;
    for (int32_t rank = 0; rank < size_; ++rank) ranks.push_back(rank);
    return ranks;
  }

  void choose_options() {
    CoordinatorOptions& o = job_.options;
    for (int32_t rank = 0; rank < size_; ++rank)
      o.names.push_back("host, pid " + std::to_string(rank));
    o.cache_capacity = one_of<size_t>(rng_, {0, 1, 2, 3, 8, 64, 64});
    o.fusion_threshold_bytes = one_of<uint64_t>(rng_, {0, 64, 256, 1024, 1 << 20, 1 << 20});
    o.max_entry_bytes = one_of<uint64_t>(rng_, {128, 512, 4096, 1 << 20});
    o.inline_bytes = one_of<uint64_t>(rng_, {0, 32, 256, 256});
    o.flush_bytes = one_of<uint64_t>(rng_, {64, 512, 4096, 1 << 20});
    o.join_all_ops = percent(rng_, 30);
    o.disable_group_fusion = percent(rng_, 30);
    o.plan_hash = rng_();
    if (percent(rng_, 10)) o.min_cycle = std::chrono::milliseconds(5);
    if (percent(rng_, 20)) o.stall_warning = {};
    if (percent(rng_, 20)) o.answers = {};
    o.crossed = {};  // programs here reuse names in every set on purpose; unit laws cover it
    if (percent(rng_, 20)) {
      o.stall_shutdown = std::chrono::seconds(one_of<int>(rng_, {30, 90}));
      // The deadlock time would always be over first; without it, the limit has to count.
      const bool counts = o.stall_shutdown >= o.stall_warning;
      if (counts && percent(rng_, 60)) o.deadlock = {};
    }
    for (int32_t rank = 0; rank < size_; ++rank) {
      job_.speed.push_back(percent(rng_, 20) ? 5 : 100);
    }
  }

  void add_round() {
    const uint64_t dice = below(rng_, 100);
    if (dice < 62) {
      batch();
    } else if (dice < 72) {
      add_set();
    } else if (dice < 79) {
      remove_set();
    } else if (dice < 91) {
      join();
    } else {
      barrier();
    }
  }

  // ---- Calls ----

  void submit(int32_t rank, size_t set, const Request& request, bool sync, size_t adds = 0) {
    const Key key{set, request.name};
    std::set<Key>& pending = pending_[static_cast<size_t>(rank)];
    wait(rank, key);
    if (percent(rng_, 1)) sleep(rank);
    script(rank).push_back({Step::Do::Submit, set, adds, request, sync, {}});
    if (!sync) pending.insert(key);
  }

  void reject(int32_t rank, size_t set, const Request& request) {
    wait(rank, {set, request.name});
    script(rank).push_back({Step::Do::Reject, set, 0, request, false, {}});
  }

  // Work of one rank alone, longer than some of the clocks.
  void sleep(int32_t rank) {
    const std::chrono::seconds time(20 + below(rng_, 200));
    script(rank).push_back({Step::Do::Sleep, 0, 0, {}, false, time});
  }

  void wait(int32_t rank, const Key& key) {
    if (pending_[static_cast<size_t>(rank)].erase(key) == 0) return;
    Step step{Step::Do::Wait, key.first, 0, {}, false, {}};
    step.request.name = key.second;
    script(rank).push_back(std::move(step));
  }

  void wait_for_all(int32_t rank) {
    const std::set<Key>& pending = pending_[static_cast<size_t>(rank)];
    std::vector<Key> keys(pending.begin(), pending.end());
    std::shuffle(keys.begin(), keys.end(), rng_);
    for (const Key& key : keys) wait(rank, key);
  }

  Script& script(int32_t rank) { return job_.scripts[static_cast<size_t>(rank)]; }

  TensorSpec spec() {
    TensorSpec out{one_of<DType>(rng_, {DType::Float32, DType::Float16, DType::Int64}), {}};
    for (uint64_t n = 1 + below(rng_, 2); n > 0; --n) {
      out.shape.push_back(static_cast<int64_t>(below(rng_, 12)));
    }
    return out;
  }

  Request signature(const std::string& name, const Ranks& members) {
    Request r;
    r.name = name;
    r.kind = one_of<OpKind>(
        rng_, {OpKind::Allreduce, OpKind::Allreduce, OpKind::Allreduce, OpKind::Allgather,
               OpKind::Broadcast, OpKind::Alltoall, OpKind::Reducescatter});
    r.tensors.assign(1, spec());
    if (percent(rng_, 15)) r.tensors.push_back(spec());
    if (percent(rng_, 10)) r.prescale = 0.5;
    if (percent(rng_, 10)) r.op = ReduceOp::Max;
    if (info(r.kind).rooted) r.root = one_of(rng_, members);
    if (info(r.kind).own_rows && percent(rng_, 3)) r.scalar = true;
    return r;
  }

  // Makes one rank's call differ; sometimes in something that nobody compares.
  void change(Request& r) {
    TensorSpec& tensor = r.tensors[below(rng_, r.tensors.size())];
    switch (below(rng_, 10)) {
      case 0:
        tensor.dtype = DType::Bool;
        break;
      case 1:
        tensor.shape.push_back(2);
        break;
      case 2:
        if (!tensor.shape.empty()) tensor.shape.back() += 1;
        break;
      case 3:
        r.kind = r.kind == OpKind::Broadcast ? OpKind::Allreduce : OpKind::Broadcast;
        break;
      case 4:
        r.prescale += 1;
        break;
      case 5:
        r.postscale += 1;
        break;
      case 6:
        r.op = r.op == ReduceOp::Min ? ReduceOp::Sum : ReduceOp::Min;
        break;
      case 7:
        r.root = r.root == 0 ? size_ - 1 : 0;
        break;
      case 8:
        r.tensors.push_back(spec());
        break;
      default:
        r.scalar = !r.scalar;
        break;
    }
  }

  Fault fault() {
    const uint64_t dice = below(rng_, 200);
    if (dice < 10) return Fault::Change;
    if (dice < 15) return Fault::Reject;
    if (dice < 20) return Fault::RejectAndRetry;
    if (dice < 22) return Fault::RejectEverywhere;
    if (dice < 23) return Fault::Skip;
    return Fault::None;
  }

  // ---- Rounds ----

  struct PlannedCall {
    Request request;
    Fault fault;
    int32_t culprit;
    Request changed;
  };

  PlannedCall plan_call(const SetPlan& set, size_t number) {
    const bool unnamed = percent(rng_, 15);
    const std::string name =
        unnamed ? "noname." + std::to_string(unnamed_++) : "t" + std::to_string(number);
    auto [it, fresh] = signatures_.try_emplace(Key{set.number, name});
    if (fresh || percent(rng_, 8)) it->second = signature(name, set.members);
    it->second.unnamed = unnamed;
    PlannedCall out{it->second, fault(), one_of(rng_, set.members), it->second};
    if (out.fault == Fault::Change) change(out.changed);
    return out;
  }

  void perform(int32_t rank, size_t set, const PlannedCall& planned, bool sync) {
    const bool culprit = rank == planned.culprit;
    const Request& request = planned.request;
    switch (planned.fault) {
      case Fault::None:
        return submit(rank, set, request, sync);
      case Fault::Change:
        return submit(rank, set, culprit ? planned.changed : request, sync);
      case Fault::Reject:
        return culprit ? reject(rank, set, request) : submit(rank, set, request, sync);
      case Fault::RejectAndRetry:
        culprit ? reject(rank, set, request) : submit(rank, set, request, sync);
        return submit(rank, set, request, sync);
      case Fault::RejectEverywhere:
        return reject(rank, set, request);
      case Fault::Skip:
        if (!culprit) submit(rank, set, request, sync);
        return;
    }
  }

  // Some calls of one set: one after the other in the same order, or all at once in any order.
  void batch() {
    const SetPlan set = one_of(rng_, sets_);
    const bool sync = percent(rng_, 35);
    const bool wait_now = percent(rng_, 75);
    std::vector<size_t> numbers = {0, 1, 2, 3, 4, 5, 6, 7};
    std::shuffle(numbers.begin(), numbers.end(), rng_);
    std::vector<PlannedCall> calls;
    for (uint64_t n = 1 + below(rng_, 6); n > 0; --n) calls.push_back(plan_call(set, numbers[n]));
    for (int32_t rank : set.members) {
      if (!sync) std::shuffle(calls.begin(), calls.end(), rng_);
      for (const PlannedCall& planned : calls) perform(rank, set.number, planned, sync);
      if (wait_now) wait_for_all(rank);
    }
  }

  void add_set() {
    Request r;
    r.kind = OpKind::AddSet;
    r.unnamed = true;
    const size_t number = ++added_;
    r.name = "add." + std::to_string(number);
    for (int32_t rank : all()) {
      if (percent(rng_, 60)) r.ranks.push_back(rank);
    }
    bool good = !r.ranks.empty();
    for (const SetPlan& set : sets_) good = good && set.members != r.ranks;
    Request changed = r;
    if (percent(rng_, 8)) changed.ranks.push_back(size_);
    if (percent(rng_, 8)) r.ranks = changed.ranks;
    good = good && changed.ranks.back() < size_;
    const int32_t culprit = one_of(rng_, all());
    for (int32_t rank : all()) submit(rank, 0, rank == culprit ? changed : r, true, number);
    if (good) sets_.push_back({number, r.ranks});
  }

  void remove_set() {
    if (sets_.size() == 1) return;
    const size_t place = 1 + below(rng_, sets_.size() - 1);
    const SetPlan set = sets_[place];
    for (int32_t rank : set.members) {  // calls that nobody answers any more
      if (percent(rng_, 20)) submit(rank, set.number, signature("orphan", set.members), false);
    }
    Request r;
    r.kind = OpKind::RemoveSet;
    r.unnamed = true;
    r.name = "remove." + std::to_string(removed_++);
    r.root = static_cast<int32_t>(set.number);
    if (percent(rng_, 8)) r.root = 0;
    Request changed = r;
    if (percent(rng_, 8)) changed.root = 0;
    const int32_t culprit = one_of(rng_, all());
    for (int32_t rank : all()) submit(rank, 0, rank == culprit ? changed : r, true);
    if (changed.root != 0) sets_.erase(sets_.begin() + static_cast<std::ptrdiff_t>(place));
  }

  // Ranks run out of data at different times, in one set or in all of them.
  void join() {
    const SetPlan set = one_of(rng_, sets_);
    std::vector<Request> calls;
    for (size_t i = 0; i < 4; ++i) {
      const std::string name = "u" + std::to_string(i);
      auto [it, fresh] = signatures_.try_emplace(Key{set.number, name});
      if (fresh || percent(rng_, 20)) {
        it->second = signature(name, set.members);
        if (!percent(rng_, 30)) it->second.kind = OpKind::Allreduce;
      }
      Request r = it->second;
      if (percent(rng_, 10)) {
        r.kind = OpKind::Barrier;
        r.tensors.clear();
      }
      r.scalar = false;
      calls.push_back(std::move(r));
    }
    const bool sync = percent(rng_, 50);
    Request join;
    join.kind = OpKind::Join;
    join.unnamed = true;
    join.name = "end." + std::to_string(joins_++);
    const int32_t culprit = percent(rng_, 10) ? one_of(rng_, all()) : -1;
    for (int32_t rank : all()) {
      const bool member =
          std::find(set.members.begin(), set.members.end(), rank) != set.members.end();
      const uint64_t count = member ? below(rng_, calls.size() + 1) : 0;
      for (uint64_t i = 0; i < count; ++i) submit(rank, set.number, calls[i], sync);
      if (percent(rng_, 50)) wait_for_all(rank);
      rank == culprit ? reject(rank, 0, join) : submit(rank, 0, join, true);
    }
  }

  void barrier() {
    const SetPlan set = one_of(rng_, sets_);
    Request r;
    r.kind = OpKind::Barrier;
    r.unnamed = true;
    r.name = "all." + std::to_string(barriers_++);
    for (int32_t rank : set.members) submit(rank, set.number, r, true);
  }

  void finish() {
    for (int32_t rank : all()) {
      if (percent(rng_, 85)) wait_for_all(rank);
      script(rank).push_back({Step::Do::Leave, 0, 0, {}, false, {}});
    }
    if (percent(rng_, 6)) {
      Script& early = script(one_of(rng_, all()));
      early.resize(below(rng_, early.size()));
      early.push_back({Step::Do::Leave, 0, 0, {}, false, {}});
      early.back().request.name = "it had enough";
    }
    if (percent(rng_, 4)) {
      job_.dies = one_of(rng_, all());
      job_.dies_after = below(rng_, 400);
    }
  }

  Rng rng_;
  int32_t size_ = 0;
  Job job_;
  std::vector<SetPlan> sets_;
  std::vector<std::set<Key>> pending_;  // by rank: submitted and not waited for
  std::map<Key, Request> signatures_;
  size_t unnamed_ = 0, added_ = 0, removed_ = 0, joins_ = 0, barriers_ = 0;
};

inline Job make_job(uint64_t seed) { return Generator(seed).make(); }

}  // namespace horovod::sim
