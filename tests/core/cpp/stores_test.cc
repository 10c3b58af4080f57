// The choice of stores with made-up times. Knows no clock, slot or transport.
#include "core/stores.h"

#include <array>
#include <chrono>
#include <iostream>
#include <string>

#include "check.h"

namespace horovod {
namespace {

using std::chrono::nanoseconds;

// What a MiB takes with ordinary and with streaming stores.
using Costs = std::array<nanoseconds, 2>;
constexpr uint64_t kMiB = 1 << 20;
constexpr Costs kShared{nanoseconds(200'000), nanoseconds(350'000)};  // one cache for all
constexpr Costs kApart{nanoseconds(400'000), nanoseconds(250'000)};   // a cache each

constexpr uint64_t kPairBytes = 2 * StoreChoice::kStretchBytes;
constexpr uint64_t kTrialBytes = StoreChoice::kLead * kPairBytes;  // if all pairs agree

// A leader writes so many bytes. How many of them with `stores`.
uint64_t write(StoreChoice& choice, const Costs& costs, uint64_t bytes,
               Stores stores = Stores::Ordinary, uint64_t step_bytes = kMiB) {
  uint64_t with = 0;
  for (uint64_t written = 0; written < bytes; written += step_bytes) {
    const Stores next = choice.next();
    if (next == stores) with += step_bytes;
    choice.wrote(step_bytes, costs[static_cast<size_t>(next)] * step_bytes / kMiB);
  }
  return with;
}

// Both changes of the machine are followed, by the first trial after them.
void test_changes() {
  StoreChoice choice;
  CHECK(choice.next() == Stores::Streaming);
  write(choice, kShared, kTrialBytes - kMiB);
  CHECK_EQ(choice.take_finding(), std::string());
  write(choice, kShared, kMiB);
  CHECK(choice.next() == Stores::Ordinary);
  CHECK(choice.take_finding().starts_with("ordinary stores into slots"));
  CHECK_EQ(choice.take_finding(), std::string());
  CHECK_EQ(write(choice, kApart, StoreChoice::kPauseBytes, Stores::Streaming), 0u);
  write(choice, kApart, kTrialBytes);
  CHECK(choice.next() == Stores::Streaming);
  CHECK(choice.take_finding().starts_with("streaming stores into slots"));
}

// Small steps are judged as large ones are, by the bytes of a stretch; each of those that are
// larger than a stretch takes two.
void test_step_sizes() {
  for (const uint64_t step_bytes : {kMiB / 8, StoreChoice::kStretchBytes}) {
    StoreChoice choice;
    write(choice, kShared, 2 * kTrialBytes, Stores::Ordinary, step_bytes);
    CHECK(choice.next() == Stores::Ordinary);
  }
}

// As long as the choice is right, hardly anything is written otherwise.
void test_price() {
  StoreChoice choice;
  const uint64_t bytes = 16 * StoreChoice::kPauseBytes;
  CHECK(write(choice, kApart, bytes) <= bytes / 30);
  CHECK_EQ(choice.take_finding(), std::string());
}

// Neither a little less nor pairs that went badly for it change the choice, if they are few.
void test_noise() {
  StoreChoice choice;
  write(choice, {nanoseconds(243'000), nanoseconds(250'000)}, 4 * StoreChoice::kPauseBytes);
  CHECK_EQ(choice.take_finding(), std::string());
  for (int i = 0; i < 8; ++i) {
    write(choice, kShared, (StoreChoice::kLead - 1) * kPairBytes);
    write(choice, kApart, (2 * StoreChoice::kLead - 1) * kPairBytes);
    CHECK(choice.next() == Stores::Streaming);
    write(choice, kApart, StoreChoice::kPauseBytes);
  }
  CHECK_EQ(choice.take_finding(), std::string());
}

// The caches have to get used to a kind of stores before its time counts.
void test_settling() {
  StoreChoice choice;
  Stores before = choice.next();
  uint64_t same = 0;
  for (uint64_t written = 0; written < kTrialBytes; written += kMiB) {
    const Stores next = choice.next();
    same = next == before ? same + kMiB : 0;
    before = next;
    const bool slow = next == Stores::Ordinary && same < StoreChoice::kSettleBytes;
    choice.wrote(kMiB, slow ? nanoseconds(9'000'000) : kShared[static_cast<size_t>(next)]);
  }
  CHECK(choice.next() == Stores::Ordinary);
}

void test_followers() {
  StoreChoice choice;
  choice.follow(Stores::Ordinary);
  CHECK(choice.next() == Stores::Ordinary);
  choice.follow(Stores::Streaming);
  CHECK(choice.next() == Stores::Streaming);
}

void test_fixed() {
  for (const Stores stores : {Stores::Ordinary, Stores::Streaming}) {
    StoreChoice choice(stores);
    const uint64_t bytes = 2 * StoreChoice::kPauseBytes;
    CHECK_EQ(write(choice, stores == Stores::Ordinary ? kApart : kShared, bytes, stores), bytes);
    choice.follow(stores == Stores::Ordinary ? Stores::Streaming : Stores::Ordinary);
    CHECK(choice.next() == stores);
    CHECK_EQ(choice.take_finding(), std::string());
  }
}

void test_names() {
  CHECK(store_choice("ordinary").next() == Stores::Ordinary);
  CHECK(store_choice("streaming").next() == Stores::Streaming);
  StoreChoice choice = store_choice("auto");
  write(choice, kShared, kTrialBytes);
  CHECK_EQ(choice.take_finding().empty(), !kHasStreamingStores);
  bool refused = false;
  try {
    store_choice("fast");
  } catch (const Error& e) {
    refused = e.status().kind == ErrorKind::InvalidArgument;
  }
  CHECK(refused);
}

}  // namespace
}  // namespace horovod

int main() {
  horovod::test_changes();
  horovod::test_step_sizes();
  horovod::test_price();
  horovod::test_noise();
  horovod::test_settling();
  horovod::test_followers();
  horovod::test_fixed();
  horovod::test_names();
  std::cout << "stores are chosen by what they cost\n";
}
