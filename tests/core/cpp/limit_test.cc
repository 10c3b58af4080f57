// The yard-stick with threads as ranks: right sums for every size, slot and kind of store, and no
// wait without an end. Knows no engine.
#include "core/limit.h"

#include <functional>
#include <iostream>
#include <thread>
#include <vector>

#include "check.h"

namespace horovod {
namespace {

constexpr uint64_t kSlotBytes = 4096;

void on_ranks(int32_t size, std::chrono::nanoseconds patience,
              const std::function<void(Limit&, int32_t)>& run) {
  const Mapping memory = anonymous_segment(limit_bytes(size, kSlotBytes));
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Limit limit({.rank = rank,
                   .size = size,
                   .memory = memory,
                   .slot_bytes = kSlotBytes,
                   .kernels = &kernels("auto"),
                   .patience = patience,
                   .spin = rank % 2 == 0});
      run(limit, rank);
    });
  }
  for (auto& thread : threads) thread.join();
}

float term(int32_t rank, size_t i) { return static_cast<float>((rank + 1) * (i % 61 + 1)); }

void sums(int32_t size) {
  const auto all = static_cast<float>(size * (size + 1) / 2);
  on_ranks(size, std::chrono::seconds(60), [&](Limit& limit, int32_t rank) {
    for (const size_t count : {0, 1, 16, 17, 1000, 1025, 5000}) {
      for (const uint64_t slot_bytes : {uint64_t{64}, uint64_t{1024}, kSlotBytes}) {
        for (const Stores stores : {Stores::Ordinary, Stores::Streaming}) {
          std::vector<float> data(count + 1, -1.0f);  // one more, which nobody may write to
          for (size_t i = 0; i < count; ++i) data[i] = term(rank, i);
          limit.allreduce(data.data(), count, slot_bytes, stores);
          for (size_t i = 0; i < count; ++i) CHECK_EQ(data[i], all * term(0, i));
          CHECK_EQ(data[count], -1.0f);
        }
      }
    }
  });
}

ErrorKind kind_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& e) {
    return e.status().kind;
  }
  return ErrorKind::None;
}

void a_peer_that_does_not_come_is_an_error() {
  on_ranks(3, std::chrono::milliseconds(100), [](Limit& limit, int32_t rank) {
    if (rank == 1) return;
    float data[40] = {};
    CHECK(kind_of([&] { limit.allreduce(data, 40, 64, Stores::Ordinary); }) == ErrorKind::PeerLost);
  });
}

LimitOptions options_of(int32_t rank, int32_t size) {
  LimitOptions options;
  options.rank = rank;
  options.size = size;
  options.slot_bytes = kSlotBytes;
  return options;
}

void what_does_not_fit_is_refused() {
  CHECK(kind_of([] { Limit(options_of(0, 1)); }) == ErrorKind::InvalidArgument);
  CHECK(kind_of([] { Limit(options_of(2, 2)); }) == ErrorKind::InvalidArgument);
  Limit limit(options_of(0, 2));
  float data[1] = {};
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{100}, kSlotBytes + 64}) {
    CHECK(kind_of([&] { limit.allreduce(data, 1, bytes, Stores::Ordinary); }) ==
          ErrorKind::InvalidArgument);
  }
}

}  // namespace
}  // namespace horovod

int main() {
  for (const int32_t size : {2, 5}) horovod::sums(size);
  horovod::a_peer_that_does_not_come_is_an_error();
  horovod::what_does_not_fit_is_refused();
  std::cout << "limit_test passed" << std::endl;
}
