// L1: which kind of stores pays for the slots of this rank, judged by its own traffic. Must not
// know clocks, slots or schedules: it is told what writing and reading took.
//
// What is best depends on which caches the ranks share, and a virtual machine doesn't say that
// reliably. So now and then, for a short while, a rank writes its slots in both ways by turns, and
// both sides take the time: writers of writing and readers of reading, since what is fast for the
// one may be slow for the other. The medians of both decide, which bear with a few times in which
// the process had to wait for its core. Ranks may choose differently and never have to agree: the
// bits are the same.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace horovod {

class StoreChoice {
 public:
  // Smaller slots tell what a call costs rather than what a byte does.
  static constexpr uint64_t kLeastBytes = 4096;
  // A trial is a number of blocks, in slots. In each the first few don't count: they find the
  // caches as the other kind of stores has left them.
  static constexpr uint64_t kBlock = 16, kSettle = 8, kTrial = 2 * kBlock;
  // Slots between two trials: the answer changes when a hypervisor moves a rank to another core.
  static constexpr uint64_t kPause = 2048;
  static constexpr uint64_t kShortPause = 512;  // if the rank has read too little, as a root does
  // Streaming has to look that much cheaper. The times hold the user's memory too, so neither kind
  // ever looks far ahead; and they hide some of what streaming costs, as its stores end later.
  // Measured, time with streaming to time with ordinary stores: 0.81 and up where two ranks share a
  // core and ordinary stores are better, 0.74 and down where each has its own.
  static constexpr double kWorthStreaming = 0.78;

  // Always `fixed`, if that is given.
  explicit StoreChoice(std::optional<Stores> fixed = {}) : fixed_(fixed.has_value()) {
    if (fixed) chosen_ = *fixed;
  }

  // What the next slot is to be written with.
  Stores next() const { return in_trial() ? kind_of(slots_ / kBlock) : chosen_; }

  // Whether to take the time of writing or reading a slot of `bytes`. Tell then what it was, of
  // writing with next() or of reading what was written with `stores`; else only that one was
  // written.
  bool measures(uint64_t bytes) const { return in_trial() && bytes >= kLeastBytes; }
  void wrote(uint64_t bytes, uint64_t ns) {
    if (slots_ % kBlock >= kSettle) add(writes_, next(), bytes, ns);
    if (++slots_ == kTrial) decide();
  }
  void read(Stores stores, uint64_t bytes, uint64_t ns) { add(reads_, stores, bytes, ns); }
  void wrote_unmeasured() {
    if (!in_trial() && ++slots_ == next_trial_) slots_ = 0;
  }

  // For the log, when a trial has changed the choice; else empty.
  std::string take_finding() { return std::exchange(finding_, {}); }

 private:
  using Times = std::array<std::vector<double>, 2>;  // of each kind, in ns a byte

  static Stores kind_of(uint64_t block) {
    return block == 0 ? Stores::Streaming : Stores::Ordinary;
  }
  static void add(Times& to, Stores stores, uint64_t bytes, uint64_t ns) {
    auto& times = to[static_cast<size_t>(stores)];
    if (times.size() < kTrial)
      times.push_back(static_cast<double>(ns) / static_cast<double>(bytes));
  }
  static double median(std::vector<double>& times) {
    const auto middle = times.begin() + static_cast<ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    return *middle;
  }

  bool in_trial() const { return !fixed_ && slots_ < kTrial; }

  void decide() {
    const bool told = std::all_of(reads_.begin(), reads_.end(),
                                  [](const auto& times) { return times.size() >= kSettle; });
    next_trial_ = kTrial + (told ? kPause : kShortPause);
    if (told) choose(cost(Stores::Ordinary), cost(Stores::Streaming));
    for (Times* times : {&writes_, &reads_}) *times = {};
  }
  double cost(Stores stores) {
    const auto kind = static_cast<size_t>(stores);
    return median(writes_[kind]) + median(reads_[kind]);
  }
  void choose(double ordinary, double streaming) {
    const Stores before = chosen_;
    chosen_ = streaming < kWorthStreaming * ordinary ? Stores::Streaming : Stores::Ordinary;
    if (std::exchange(decided_, true) && chosen_ == before) return;
    finding_ = std::string(chosen_ == Stores::Ordinary ? "ordinary" : "streaming") +
               " stores into slots from now on: a byte through a slot takes " +
               std::to_string(ordinary) + " ns with ordinary ones, " + std::to_string(streaming) +
               " ns with streaming ones";
  }

  bool fixed_;
  Stores chosen_ = Stores::Streaming;
  bool decided_ = false;
  uint64_t slots_ = 0;  // since the last trial began
  uint64_t next_trial_ = 0;
  Times writes_, reads_;
  std::string finding_;
};

// "ordinary", "streaming", or "auto" for what trials find where there are two kinds. Throws
// Error(InvalidArgument) for anything else.
inline StoreChoice store_choice(const std::string& name) {
  if (name == "ordinary") return StoreChoice(Stores::Ordinary);
  if (name == "streaming") return StoreChoice(Stores::Streaming);
  if (name != "auto") {
    throw Error(ErrorKind::InvalidArgument,
                "no stores are called '" + name + "'; there are auto, ordinary and streaming");
  }
  return kHasStreamingStores ? StoreChoice() : StoreChoice(Stores::Ordinary);
}

}  // namespace horovod
