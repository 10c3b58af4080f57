// The laws of native adapters' calls, with threads as ranks: every call's callback runs once, with
// a right result or an error, whether it came from a program or from another callback. Made for
// sanitizers; knows nothing of Python.
#include "core/door.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "world.h"

namespace horovod::world {
namespace {

// A door for an engine that somebody else owns.
std::unique_ptr<Doorway> door_of(World& world, int32_t rank) {
  auto door = std::make_unique<Doorway>();
  door->open(std::shared_ptr<Engine>(std::shared_ptr<void>(), &world[rank]),
             {rank, world.size(), rank, world.size()});
  return door;
}

void wait_for(const std::function<bool()>& done) {
  const auto deadline = std::chrono::steady_clock::now() + kDeadline;
  while (!done()) {
    CHECK(std::chrono::steady_clock::now() < deadline);
    std::this_thread::sleep_for(1ms);
  }
}

// What a callback starts: call after call under one name.
class Chain {
 public:
  Chain(Door& door, int32_t rank, int32_t size, Plot plot, int length)
      : door_(door), rank_(rank), size_(size), plot_(std::move(plot)), left_(length) {}

  void go() {
    job_ = make_job(plot_, rank_, size_);
    job_.call->when_done = [this](LocalCall& call) {
      ++callbacks;
      if (!call.status.ok()) return end(call.status);
      check_result(job_);
      if (--left_ == 0) return end({});
      go();
    };
    ++calls;
    const auto call = job_.call;
    const Status status = door_.submit(call, "train.py:1");
    if (status.ok()) return;
    --calls;
    end(status);
  }

  std::atomic<int> calls{0}, callbacks{0};
  std::atomic<bool> ended{false};
  Status status;

 private:
  void end(const Status& how) {
    status = how;
    ended = true;
  }

  Door& door_;
  const int32_t rank_, size_;
  const Plot plot_;
  int left_;
  Job job_;
};

constexpr OpKind kMoving[] = {OpKind::Allreduce, OpKind::Allgather, OpKind::Broadcast,
                              OpKind::Alltoall, OpKind::Reducescatter};

// Nobody waits in the engine: callbacks carry everything on, while a program's calls go by.
void test_chains() {
  for (const int32_t size : {1, 2, 3}) {
    World world(size, {.plan = tiny_plan()});
    world.each_rank([&](int32_t r) {
      const auto door = door_of(world, r);
      std::vector<std::unique_ptr<Chain>> chains;
      for (size_t c = 0; c < std::size(kMoving); ++c) {
        const Plot plot{.kind = kMoving[c],
                        .name = label("chain", static_cast<int>(c)),
                        .counts = {static_cast<int64_t>(1 + 700 * c)}};
        chains.push_back(std::make_unique<Chain>(*door, r, size, plot, 25));
      }
      if (r % 2 == 1) std::reverse(chains.begin(), chains.end());
      for (auto& chain : chains) chain->go();
      for (int k = 0; k < 10; ++k) {
        Job job = make_job({.name = "blocking", .counts = {300}}, r, size);
        CHECK(door->run(job.call, "").ok());
        check_result(job);
      }
      wait_for([&] {
        return std::all_of(chains.begin(), chains.end(), [](auto& c) { return c->ended.load(); });
      });
      for (auto& chain : chains) {
        CHECK(chain->status.ok());
        CHECK_EQ(chain->callbacks.load(), 25);
      }
      CHECK(world[r].pending().empty());
    });
  }
}

// Outputs whose size only the data plane knows land in the adapter's memory.
void test_memory_of_the_adapter() {
  constexpr int32_t kSize = 3;
  World world(kSize, {.plan = tiny_plan()});
  world.each_rank([&](int32_t r) {
    const auto door = door_of(world, r);
    for (const OpKind kind : {OpKind::Allgather, OpKind::Alltoall, OpKind::Reducescatter}) {
      Job job = make_job({.kind = kind, .name = "x", .counts = {900}}, r, kSize);
      std::vector<std::byte> memory;
      Shape given;
      job.call->allocate = [&](size_t tensor, const Shape& shape) {
        CHECK_EQ(tensor, size_t{0});
        given = shape;
        memory.resize(count_of(shape) * info(job.call->tensors[0].dtype).size + 1);
        return memory.data();
      };
      CHECK(door->run(job.call, "").ok());
      CHECK(job.call->outputs.empty());
      memory.pop_back();
      CHECK(memory == job.expected[0]);
    }
    // Memory that is refused ends the job, as it does for the core's own.
  });
  World poor(2, {.plan = tiny_plan()});
  poor.each_rank([&](int32_t r) {
    const auto door = door_of(poor, r);
    Job job = make_job({.kind = OpKind::Allgather, .name = "x", .counts = {900}}, r, 2);
    if (r == 1) job.call->allocate = [](size_t, const Shape&) { return nullptr; };
    const Status status = door->run(job.call, "");
    CHECK(status.kind == ErrorKind::Resource);
    CHECK_EQ(status.rank, 1);
  });
}

// Whatever ends the engine, no callback is forgotten, and whoever calls again from one is refused.
void test_ends() {
  for (int k = 0; k < 20; ++k) {
    constexpr int32_t kSize = 2;
    World world(kSize, {.plan = tiny_plan()});
    const int32_t leaver = k % kSize;
    std::atomic<int> ready{0};
    world.each_rank([&](int32_t r) {
      const auto door = door_of(world, r);
      std::vector<std::unique_ptr<Chain>> chains;
      for (int c = 0; c < 4; ++c) {
        const Plot plot{.name = label("c", c), .counts = {200}};
        chains.push_back(std::make_unique<Chain>(*door, r, kSize, plot, 1 << 30));
        chains.back()->go();
      }
      wait_for([&] { return chains.back()->callbacks > 5; });
      ++ready;
      if (r == leaver) {
        while (ready < kSize) std::this_thread::yield();
        door->close();
        world[r].shutdown(k % 4 < 2 ? "" : "enough", 1s);
      }
      wait_for([&] {
        return std::all_of(chains.begin(), chains.end(), [](auto& c) { return c->ended.load(); });
      });
      for (auto& chain : chains) {
        CHECK(!chain->status.ok());
        CHECK_EQ(chain->callbacks.load(), chain->calls.load());
      }
    });
  }
}

void test_closed_door() {
  Doorway door;
  Job job = make_job({.name = "x", .counts = {3}}, 0, 1);
  CHECK(door.run(job.call, "").kind == ErrorKind::Shutdown);
  std::atomic<bool> called{false};
  job.call->when_done = [&](LocalCall&) { called = true; };
  CHECK(door.submit(job.call, "").kind == ErrorKind::Shutdown);
  CHECK(!called);
  door.reject({OpKind::Allreduce, 0, "x", "why"});
  door.warn("nobody hears it");
  CHECK(door.members(0).empty());
  CHECK_EQ(door.world().size, 0);
  World world(1, {});
  const auto open = door_of(world, 0);
  CHECK_EQ(open->members(0).size(), size_t{1});
  CHECK(open->members(9).empty());
  open->warn("heard");
  CHECK_EQ(world[0].take_messages().size(), size_t{1});
  // Nor may a callback wait.
  Job first = make_job({.name = "first", .counts = {3}}, 0, 1);
  Job second = make_job({.name = "second", .counts = {3}}, 0, 1);
  std::atomic<bool> refused{false};
  first.call->when_done = [&](LocalCall&) {
    refused = open->run(second.call, "").kind == ErrorKind::Resource;
    called = true;
  };
  CHECK(open->submit(first.call, "").ok());
  wait_for([&] { return called.load(); });
  CHECK(refused);
  CHECK(open->run(second.call, "").ok());
  called = false;
  // A call that is wrong by itself is refused at once, and its callback never runs.
  Job wrong = make_job({.name = "x", .counts = {3}, .set = 9}, 0, 1);
  wrong.call->when_done = [&](LocalCall&) { called = true; };
  CHECK(open->submit(wrong.call, "").kind == ErrorKind::InvalidArgument);
  CHECK(!called);
}

}  // namespace
}  // namespace horovod::world

int main() {
  const auto test = [](const char* name, void (*run)()) {
    run();
    std::cout << name << std::endl;
  };
  test("closed door", horovod::world::test_closed_door);
  test("memory of the adapter", horovod::world::test_memory_of_the_adapter);
  test("chains", horovod::world::test_chains);
  test("ends", horovod::world::test_ends);
}
