// L1: which kind of stores pays for shared-memory slots, judged by how long whole stretches of
// traffic take. Must not know clocks, slots or schedules: it is told bytes and times.
//
// What is best depends on which caches the ranks share, and a virtual machine doesn't say that
// reliably, nor does it stay so. The time of a single slot doesn't tell either: streaming stores
// end later than the instructions do, and what a writer saves a reader may pay. So now and then one
// rank tries both kinds in turns, a stretch of its traffic with each, and compares how long the
// stretches took, waiting for peers included. The others follow it: they write with the kind of
// what last came from it, as one side's stores are the other side's misses. The bits are the same
// with both.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "kernels.h"

namespace horovod {

class StoreChoice {
 public:
  // Of shorter transfers the time tells what a wake-up costs rather than what a byte does.
  static constexpr uint64_t kLeastBytes = 64 << 10;
  // A trial is pairs of stretches, one with the chosen kind and one with the other, until one of
  // the kinds has been the better one in so many pairs more: those that were disturbed decide
  // nothing. The first part of a stretch doesn't count: slots are where the other kind has left
  // them, until the outbox has been filled once.
  static constexpr int kLead = 4;
  static constexpr uint64_t kStretchBytes = 2 << 20, kSettleBytes = 1 << 20;
  // Between two trials; so a machine that has changed is noticed after a tenth of a second or so of
  // traffic, and a thirty-fourth of all bytes is written with what may be the worse kind.
  static constexpr uint64_t kPauseBytes = 256 << 20;
  // The other kind has to be better by so much.
  static constexpr double kMargin = 0.95;

  // Always `fixed`, if that is given.
  explicit StoreChoice(std::optional<Stores> fixed = {}) : fixed_(fixed.has_value()) {
    if (fixed) chosen_ = *fixed;
  }

  // What the next slot is to be written with.
  Stores next() const { return phase_ == kOther ? other() : chosen_; }

  // For who leads: `bytes` were written with next(), which took `time`.
  void wrote(uint64_t bytes, std::chrono::nanoseconds time) {
    if (fixed_) return;
    const bool settled = bytes_ >= kSettleBytes;
    bytes_ += bytes;
    if (phase_ == kPause) {
      if (bytes_ >= kPauseBytes) begin(kChosen);
      return;
    }
    if (!settled) return;
    stretches_[phase_].bytes += bytes;
    stretches_[phase_].time += time;
    if (bytes_ < kStretchBytes) return;
    if (phase_ == kChosen) return begin(kOther);
    judge();
  }

  // For the others: the leader uses `stores`.
  void follow(Stores stores) {
    if (!fixed_) chosen_ = stores;
  }

  // For the log, when a trial has changed the choice; else empty.
  std::string take_finding() { return std::exchange(finding_, {}); }

 private:
  enum Phase : uint8_t { kChosen, kOther, kPause };

  struct Stretch {
    uint64_t bytes = 0;
    std::chrono::nanoseconds time{};

    double ns_a_byte() const {
      return static_cast<double>(time.count()) / static_cast<double>(bytes);
    }
  };

  Stores other() const {
    return chosen_ == Stores::Ordinary ? Stores::Streaming : Stores::Ordinary;
  }

  void begin(Phase phase) {
    phase_ = phase;
    bytes_ = 0;
  }

  void judge() {
    const auto [chosen, other_one] = std::exchange(stretches_, {});
    const double before = chosen.ns_a_byte(), after = other_one.ns_a_byte();
    lead_ += after < kMargin * before ? 1 : -1;
    if (std::abs(lead_) < kLead) return begin(kChosen);
    if (lead_ > 0) {
      chosen_ = other();
      finding_ = std::string(chosen_ == Stores::Ordinary ? "ordinary" : "streaming") +
                 " stores into slots from now on: a byte takes " + std::to_string(after) +
                 " ns instead of " + std::to_string(before);
    }
    lead_ = 0;
    begin(kPause);
  }

  bool fixed_;
  Stores chosen_ = Stores::Streaming;
  Phase phase_ = kChosen;
  uint64_t bytes_ = 0;                // written in this phase
  std::array<Stretch, 2> stretches_;  // of a pair, by phase, once settled
  int lead_ = 0;                      // of the other kind: pairs of this trial
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
