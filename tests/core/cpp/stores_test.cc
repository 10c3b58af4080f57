// The choice of stores with made-up times. Knows no clock, slot or transport.
#include "core/stores.h"

#include <array>
#include <iostream>
#include <string>

#include "check.h"

namespace horovod {
namespace {

struct Costs {  // in ns of 4 KiB, for ordinary and for streaming stores
  std::array<uint64_t, 2> write, read;
};

constexpr uint64_t kBytes = StoreChoice::kLeastBytes;
constexpr Costs kShared{{400, 600}, {300, 900}};  // one cache for all
constexpr Costs kApart{{900, 200}, {300, 300}};   // a cache each

uint64_t cost(const std::array<uint64_t, 2>& of, Stores stores) {
  return of[static_cast<size_t>(stores)];
}

// A rank writes so many slots and reads as many; its peer does as it does.
void run(StoreChoice& choice, const Costs& costs, uint64_t slots, bool reads = true,
         uint64_t bytes = kBytes) {
  for (uint64_t i = 0; i < slots; ++i) {
    const Stores stores = choice.next();
    if (!choice.measures(bytes)) {
      choice.wrote_unmeasured();
      continue;
    }
    // One of five took much longer: the process had to wait for its core.
    const uint64_t waited = i % 5 == 0 ? 1'000'000 : 0;
    choice.wrote(bytes, cost(costs.write, stores) * bytes / kBytes + waited);
    if (reads && choice.measures(bytes)) {
      choice.read(stores, bytes, cost(costs.read, stores) * bytes / kBytes + waited);
    }
  }
}

void test_trials() {
  StoreChoice choice;
  CHECK(choice.next() == Stores::Streaming);
  CHECK_EQ(choice.take_finding(), std::string());
  run(choice, kShared, StoreChoice::kTrial);
  CHECK(choice.next() == Stores::Ordinary);
  CHECK(choice.take_finding().starts_with("ordinary stores into slots"));
  CHECK_EQ(choice.take_finding(), std::string());
  run(choice, kShared, StoreChoice::kPause - 1);
  CHECK(choice.next() == Stores::Ordinary);
  CHECK(!choice.measures(kBytes));
  run(choice, kApart, 1 + StoreChoice::kTrial);
  CHECK(choice.next() == Stores::Streaming);
  CHECK(choice.take_finding().starts_with("streaming stores into slots"));
  run(choice, kApart, StoreChoice::kPause + StoreChoice::kTrial);
  CHECK_EQ(choice.take_finding(), std::string());  // nothing new
}

// What reading costs counts, and is a cost a byte whatever the sizes.
void test_readers() {
  const Costs slow_to_read{{500, 200}, {200, 500}};
  for (const uint64_t bytes : {kBytes, 32 * kBytes}) {
    StoreChoice choice;
    run(choice, slow_to_read, StoreChoice::kTrial, true, bytes);
    CHECK(choice.next() == Stores::Ordinary);
  }
}

// Streaming that looks only a little cheaper isn't.
void test_doubt() {
  StoreChoice choice;
  run(choice, {{400, 300}, {300, 300}}, StoreChoice::kTrial);
  CHECK(choice.next() == Stores::Ordinary);
  CHECK(!choice.measures(kBytes));
}

// Who only writes can't judge; it is asked again soon.
void test_roots() {
  StoreChoice choice;
  run(choice, kShared, StoreChoice::kTrial, false);
  CHECK(choice.next() == Stores::Streaming);
  CHECK(!choice.measures(kBytes));
  run(choice, kShared, StoreChoice::kShortPause, false);
  CHECK(choice.measures(kBytes));
  run(choice, kShared, StoreChoice::kTrial);
  CHECK(choice.next() == Stores::Ordinary);
}

void test_fixed() {
  for (const Stores stores : {Stores::Ordinary, Stores::Streaming}) {
    StoreChoice choice(stores);
    run(choice, stores == Stores::Ordinary ? kApart : kShared, 3 * StoreChoice::kPause);
    CHECK(choice.next() == stores);
    CHECK(!choice.measures(kBytes));
    CHECK_EQ(choice.take_finding(), std::string());
  }
}

void test_small_slots() {
  StoreChoice choice;
  CHECK(!choice.measures(StoreChoice::kLeastBytes - kAlignment));
  CHECK(choice.measures(StoreChoice::kLeastBytes));
}

void test_names() {
  CHECK(store_choice("ordinary").next() == Stores::Ordinary);
  CHECK(store_choice("streaming").next() == Stores::Streaming);
  CHECK_EQ(store_choice("auto").measures(kBytes), kHasStreamingStores);
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
  horovod::test_trials();
  horovod::test_readers();
  horovod::test_doubt();
  horovod::test_roots();
  horovod::test_fixed();
  horovod::test_small_slots();
  horovod::test_names();
  std::cout << "stores are chosen by what they cost\n";
}
