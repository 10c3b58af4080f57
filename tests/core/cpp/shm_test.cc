// Outboxes without engines, all ranks in one thread: who is woken by what. Knows no schedule.
#include "core/shm.h"

#include <unistd.h>

#include <array>
#include <iostream>
#include <memory>
#include <vector>

#include "check.h"
#include "core/wait.h"

namespace horovod {
namespace {

constexpr uint64_t kOutboxBytes = 4096;

class Ranks {
 public:
  explicit Ranks(int32_t size) {
    const auto n = static_cast<size_t>(size);
    ShmOptions options;
    options.outbox_bytes = kOutboxBytes;
    for (size_t r = 0; r < n; ++r) {
      options.segments.push_back(anonymous_segment(segment_bytes(n, kOutboxBytes)));
      options.doorbells.push_back(bells_.emplace_back(make_event()).get());
    }
    for (int32_t r = 0; r < size; ++r) {
      options.rank = r;
      ranks_.push_back(make_shm(options));
    }
  }
  Transport& operator[](int32_t rank) { return *ranks_[static_cast<size_t>(rank)]; }

  // Whether the doorbell of a rank was rung since the last time.
  bool rung(int32_t rank) {
    uint64_t count;
    return ::read(bells_[static_cast<size_t>(rank)].get(), &count, sizeof count) > 0;
  }
  bool falls_asleep(int32_t rank) {
    (*this)[rank].sleep(true);
    return (*this)[rank].idle();
  }

 private:
  std::vector<Descriptor> bells_;
  std::vector<std::unique_ptr<Transport>> ranks_;
};

bool send(Transport& from, int32_t to, bool oldest = true) {
  const std::array<int32_t, 1> readers{to};
  if (from.reserve(readers, from.max_slot_bytes(), oldest) == nullptr) return false;
  from.publish(Stores::Ordinary);
  return true;
}

void fill(Transport& from, int32_t to, bool oldest = true) {
  while (send(from, to, oldest)) {
  }
}

void test_arrivals() {
  Ranks ranks(2);
  CHECK(ranks.falls_asleep(1));
  CHECK(!ranks.rung(1));
  CHECK(send(ranks[0], 1));
  CHECK(ranks.rung(1));
  CHECK(send(ranks[0], 1));
  CHECK(!ranks.rung(1));  // once a sleep
  CHECK(!ranks.falls_asleep(1));
  CHECK(ranks.falls_asleep(1));  // nobody here wants the slot yet
  const std::array<std::byte, 8> message{};
  CHECK_EQ(ranks[0].write_control(1, message), message.size());
  CHECK(ranks.rung(1));
  CHECK(!ranks.falls_asleep(1));
}

void test_room() {
  Ranks ranks(3);
  CHECK(send(ranks[0], 1));
  CHECK(ranks.falls_asleep(0));
  ranks[1].consume(0);
  CHECK(!ranks.rung(0));  // it doesn't need room
  for (int round = 0; round < 3; ++round) {
    ranks[0].sleep(false);
    fill(ranks[0], 1);
    fill(ranks[0], 2, false);
    ranks[1].consume(0);  // it looks before it sleeps
    CHECK(!ranks.rung(0));
    CHECK(!ranks.falls_asleep(0));
    fill(ranks[0], 1);
    CHECK(ranks.falls_asleep(0));
    ranks[1 + round % 2].consume(0);  // whoever it is
    CHECK(ranks.rung(0));
    CHECK(!ranks.falls_asleep(0));
  }
}

// What comes after one failure isn't forgotten over the next.
void test_room_between_failures() {
  Ranks ranks(3);
  fill(ranks[0], 1);
  ranks[1].consume(0);
  fill(ranks[0], 2, false);
  CHECK(!ranks.falls_asleep(0));
  CHECK(send(ranks[0], 1));
}

void test_room_for_control() {
  Ranks ranks(2);
  const std::vector<std::byte> message(1 << 20);
  const size_t written = ranks[0].write_control(1, message);
  CHECK(written > 0 && written < message.size());
  CHECK(ranks.falls_asleep(0));
  ranks[1].consume_control(0, 1);
  CHECK(ranks.rung(0));
  CHECK(!ranks.falls_asleep(0));
  CHECK_EQ(ranks[0].write_control(1, message), size_t{1});
}

}  // namespace
}  // namespace horovod

int main() {
  horovod::test_arrivals();
  horovod::test_room();
  horovod::test_room_between_failures();
  horovod::test_room_for_control();
  std::cout << "sleepers are woken\n";
}
