// The laws of engines, with threads as ranks: right results whatever the timing, and an error on
// every rank, in time, whatever is lost. Made for sanitizers, which slow it down some tenfold;
// knows nothing of Python.
#include <algorithm>
#include <atomic>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/engine.h"
#include "world.h"

namespace horovod::world {
namespace {

using Rng = std::mt19937_64;

int64_t below(Rng& rng, int64_t n) {
  return static_cast<int64_t>(rng() % static_cast<uint64_t>(n));
}

constexpr OpKind kMoving[] = {OpKind::Allreduce, OpKind::Allgather, OpKind::Broadcast,
                              OpKind::Alltoall, OpKind::Reducescatter};

// The same on every rank that has drawn as much from an equal generator.
Plot random_plot(Rng& rng, const std::string& name, int32_t size, int64_t largest) {
  constexpr ReduceOp kOps[] = {ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max};
  constexpr DType kTypes[] = {DType::Int32, DType::Int64, DType::Float32};
  Plot plot;
  const int64_t kind = below(rng, 11);  // half of it is what training does most
  plot.kind = kind < 5 ? kMoving[kind] : kind == 5 ? OpKind::Barrier : OpKind::Allreduce;
  plot.op = kOps[below(rng, 3)];
  plot.dtype = kTypes[below(rng, 3)];
  const bool adasum = plot.dtype == DType::Float32 && below(rng, 3) == 0;
  if (adasum && plot.kind == OpKind::Allreduce) plot.op = ReduceOp::Adasum;
  plot.name = name;
  plot.in_place = below(rng, 2) == 0;
  plot.unnamed = below(rng, 8) == 0;
  plot.root = static_cast<int32_t>(below(rng, size));
  const bool grouped = plot.kind != OpKind::Alltoall && below(rng, 3) == 0;
  plot.counts.clear();
  for (int64_t left = grouped ? 1 + below(rng, 4) : 1; left > 0; --left) {
    plot.counts.push_back(below(rng, below(rng, 4) == 0 ? largest + 1 : 41));
  }
  return plot;
}

struct Load {
  const char* what;
  int32_t size;
  bool tiny;
  const char* simd;
  int threads, rounds, batch;
  int64_t largest;  // elements
};

// Each of several threads of a rank has its own names and makes its calls in an order of its own,
// then waits for them in another, polling some first.
void run_randomly(World& world, const Load& load, uint64_t seed) {
  const auto work = [&](int32_t r, int t) {
    const auto thread = static_cast<uint64_t>(t), rank = static_cast<uint64_t>(r);
    Rng common(seed * 100 + thread);                // what is done
    Rng own(seed * 100 + thread * 10 + rank + 50);  // in which order
    for (int round = 0; round < load.rounds; ++round) {
      std::vector<Job> jobs;
      for (int k = 0; k < load.batch; ++k) {
        const std::string name = label("t", t) + label(".", k);
        jobs.push_back(make_job(random_plot(common, name, load.size, load.largest), r, load.size));
      }
      std::shuffle(jobs.begin(), jobs.end(), own);
      for (Job& job : jobs) submit(world[r], job);
      std::shuffle(jobs.begin(), jobs.end(), own);
      for (Job& job : jobs) {
        if (below(own, 3) == 0) world[r].poll(job.handle);
        complete(world[r], job);
      }
    }
  };
  world.each_rank([&](int32_t r) {
    std::vector<std::thread> workers;
    for (int t = 0; t < load.threads; ++t) workers.emplace_back([&, r, t] { work(r, t); });
    for (std::thread& w : workers) w.join();
  });
}

void test_results() {
  constexpr Load kLoads[] = {
      {"a world of one", 1, false, "auto", 3, 10, 8, 5000},
      {"two ranks, tiny slots", 2, true, "auto", 2, 8, 12, 3000},
      {"two ranks", 2, false, "baseline", 3, 10, 12, 20000},
      {"three ranks, tiny slots", 3, true, "baseline", 3, 5, 8, 2000},
      {"four ranks", 4, false, "auto", 2, 6, 10, 5000},
      {"five ranks, tiny slots", 5, true, "auto", 1, 4, 10, 1000},
  };
  uint64_t seed = 1;
  for (const Load& load : kLoads) {
    World world(load.size, {.plan = load.tiny ? tiny_plan() : Plan{}, .simd = load.simd});
    run_randomly(world, load, seed++);
  }
}

// Several threads of a rank wait for one handle at once, and all see it done.
void test_shared_handles() {
  World world(2, {.plan = tiny_plan()});
  for (int round = 0; round < 20; ++round) {
    world.each_rank([&](int32_t r) {
      Job job = make_job({.name = "shared", .counts = {500}}, r, 2);
      submit(world[r], job);
      std::vector<std::thread> waiters;
      for (int w = 0; w < 3; ++w) {
        waiters.emplace_back([&] { CHECK(world[r].wait(job.handle, kDeadline)); });
      }
      for (std::thread& w : waiters) w.join();
      complete(world[r], job);
    });
  }
}

// Only the engine thread drives: nobody waits, handles are polled now and then.
void test_nobody_waits() {
  World world(3, {.plan = tiny_plan()});
  world.each_rank([&](int32_t r) {
    for (int round = 0; round < 5; ++round) {
      Job job = make_job({.name = "x", .counts = {3000}}, r, 3);
      submit(world[r], job);
      const TimePoint deadline = std::chrono::steady_clock::now() + kDeadline;
      while (!world[r].poll(job.handle)) {
        CHECK(std::chrono::steady_clock::now() < deadline);
        std::this_thread::sleep_for(1ms);
      }
      complete(world[r], job);
    }
  });
}

// Whoever has its result goes, and what else it has submitted goes on without it: here calls whose
// root gets nothing back that could wake it, and of which only the first two are in flight at once.
void test_going_on() {
  World world(2, {.plan = tiny_plan()});
  for (int round = 0; round < 10; ++round) {
    std::atomic<bool> received{false};
    world.each_rank([&](int32_t r) {
      if (r == 1) std::this_thread::sleep_for(2ms);  // the root waits by then
      std::vector<Job> jobs;
      for (int k = 0; k < 5; ++k) {
        jobs.push_back(make_job({.kind = OpKind::Broadcast, .name = label("x", k)}, r, 2));
      }
      for (Job& job : jobs) submit(world[r], job);
      if (r == 1) {
        complete(world[r], jobs.back());
        received = true;
      } else {
        complete(world[r], jobs.front());
        const TimePoint deadline = std::chrono::steady_clock::now() + kDeadline;
        while (!received && std::chrono::steady_clock::now() < deadline) {
          std::this_thread::sleep_for(1ms);
        }
        complete(world[r], jobs.back());
      }
      for (size_t k = 1; k < jobs.size() - 1; ++k) complete(world[r], jobs[k]);
      if (r == 1) complete(world[r], jobs.front());
    });
  }
}

// Makes one call; how it ended. A right result is checked.
Status attempt(World& world, int32_t r, const Plot& plot) {
  Job job = make_job(plot, r, world.size());
  try {
    submit(world[r], job);
  } catch (const Error& e) {
    return e.status();
  }
  Status status = finish(world[r], job);
  if (status.ok()) check_result(job);
  return status;
}

// Control messages of any length go through a ring of 32 KiB, over its end and piece by piece.
void test_long_names() {
  World world(3, {.plan = tiny_plan()});
  world.each_rank([&](int32_t r) {
    for (size_t round = 0; round < 40; ++round) {
      std::vector<Job> jobs;
      for (size_t k = 0; k < 3; ++k) {
        const std::string name(100 + (round * 7 + k * 3) * 977 % 20000, static_cast<char>('a' + k));
        jobs.push_back(make_job({.name = name, .counts = {50}}, r, 3));
      }
      for (Job& job : jobs) submit(world[r], job);
      for (Job& job : jobs) complete(world[r], job);
    }
  });
}

// Whoever sleeps is woken by what it waits for, not by its clock: without that every round takes
// 100 ms, with it the fastest half of them doesn't even on a busy machine.
void test_sleepers_are_woken() {
  constexpr size_t kRounds = 24;
  World world(3, {.plan = tiny_plan()});
  world.each_rank([&](int32_t r) {
    std::vector<Duration> took;
    for (size_t round = 0; round < kRounds; ++round) {
      const TimePoint start = std::chrono::steady_clock::now();
      if (r == static_cast<int32_t>(round % 3)) {
        std::this_thread::sleep_for(5ms);  // the others sleep by now
      }
      CHECK(attempt(world, r, {.name = "x", .counts = {3000}}).ok());
      took.push_back(std::chrono::steady_clock::now() - start);
    }
    std::nth_element(took.begin(), took.begin() + kRounds / 2, took.end());
    CHECK(took[kRounds / 2] < 90ms);
  });
}

uint32_t add_set(World& world, int32_t rank, const std::vector<int32_t>& members, int call) {
  Job job;
  job.call->kind = OpKind::AddSet;
  job.call->request.name = label("set ", call);
  job.call->request.unnamed = true;
  job.call->request.ranks = members;
  submit(world[rank], job);
  const Status status = finish(world[rank], job);
  if (!status.ok()) check::fail(__FILE__, __LINE__, status.text.c_str());
  return static_cast<uint32_t>(job.call->value);
}

// Sets that overlap in every way, with calls of many segments in flight in all of them at once: an
// outbox holds slots for readers that are busy with something else, and must not stop the oldest.
void test_overlapping_sets() {
  const std::vector<std::vector<int32_t>> sets = {{0, 1, 2}, {1, 3},    {0, 3}, {0, 1, 2, 3, 4},
                                                  {2, 3, 4}, {0, 2, 4}, {1, 4}};
  constexpr int32_t kSize = 5;
  World world(kSize, {.plan = tiny_plan()});
  std::vector<uint32_t> uids(sets.size());
  world.each_rank([&](int32_t r) {
    for (size_t s = 0; s < sets.size(); ++s) {
      if (sets[s].size() == kSize) continue;  // the world itself: 0
      const uint32_t uid = add_set(world, r, sets[s], static_cast<int>(s));
      if (r == 0) uids[s] = uid;
    }
  });
  for (uint64_t round = 0; round < 6; ++round) {
    world.each_rank([&](int32_t r) {
      Rng common(round), own(round * 10 + static_cast<uint64_t>(r));
      std::vector<Job> jobs;
      for (size_t s = 0; s < sets.size(); ++s) {
        for (int k = 0; k < 3; ++k) {
          Plot plot{.kind = kMoving[below(common, 5)], .name = label("x", k)};
          plot.counts = {1 + below(common, 6000)};
          plot.set = uids[s];
          plot.members = sets[s];
          plot.root = sets[s].back();
          if (std::count(sets[s].begin(), sets[s].end(), r) > 0) {
            jobs.push_back(make_job(plot, r, kSize));
          }
        }
      }
      std::shuffle(jobs.begin(), jobs.end(), own);
      for (Job& job : jobs) submit(world[r], job);
      for (Job& job : jobs) complete(world[r], job);
    });
  }
}

// Engines come and go.
void test_cycles() {
  for (int cycle = 0; cycle < 24; ++cycle) {
    const int32_t size = 1 + cycle % 4;
    World world(size, {.plan = cycle % 2 == 0 ? Plan{} : tiny_plan()});
    world.each_rank([&](int32_t r) {
      for (const OpKind kind : {OpKind::Allreduce, OpKind::Broadcast, OpKind::Allgather}) {
        Job job = make_job({.kind = kind, .name = "x", .counts = {100}}, r, size);
        submit(world[r], job);
        complete(world[r], job);
      }
      world[r].shutdown("", 2s);  // in its own time, while others may still work
    });
  }
}

Status until_failure(World& world, int32_t r, const std::vector<OpKind>& kinds, int64_t count) {
  const TimePoint deadline = std::chrono::steady_clock::now() + kDeadline;
  for (size_t k = 0;; ++k) {
    CHECK(std::chrono::steady_clock::now() < deadline);
    const Plot plot{.kind = kinds[k % kinds.size()],
                    .name = label("x", static_cast<int>(k % 7)),
                    .counts = {count}};
    Status status = attempt(world, r, plot);
    if (!status.ok()) return status;
  }
}

// Every rank has failed, the others by naming whom they lost, and no call works any more.
void check_lost(World& world, const std::vector<Status>& statuses, int32_t lost) {
  for (int32_t r = 0; r < world.size(); ++r) {
    const Status& status = statuses[static_cast<size_t>(r)];
    CHECK_EQ(int{status.kind == ErrorKind::PeerLost}, 1);
    if (r != lost) CHECK_EQ(status.rank, lost);
    CHECK(world[r].failure().has_value());
    CHECK(attempt(world, r, {.name = "too late"}).kind == ErrorKind::PeerLost);
  }
}

// Whichever rank is lost at whichever step of whichever collective, every rank gets an error.
void test_loss_at_every_step() {
  constexpr int32_t kSize = 3;
  int losses = 0;
  for (const OpKind kind : kMoving) {
    for (int32_t lost = 0; lost < kSize; ++lost) {
      for (int step = 1; step <= 41; step += 4) {
        World* cutter = nullptr;
        World world(kSize, {.plan = tiny_plan(),
                            .wrap = [&](int32_t rank, std::unique_ptr<Transport> inner) {
                              if (rank != lost) return inner;
                              return lose(std::move(inner), step, [&] { cutter->cut(lost); });
                            }});
        cutter = &world;
        std::vector<Status> statuses(kSize);
        world.each_rank([&](int32_t r) {
          statuses[static_cast<size_t>(r)] = until_failure(world, r, {kind}, 300);
        });
        check_lost(world, statuses, lost);
        ++losses;
      }
    }
  }
  std::cout << losses << " losses, ";
}

// A rank that is still there but does nothing any more is noticed by its missing life signs.
void test_freeze() {
  for (int32_t frozen = 0; frozen < 3; ++frozen) {
    World world(3, {.plan = tiny_plan(),
                    .limits = {.heartbeat = 500ms},
                    .wrap = [&](int32_t rank, std::unique_ptr<Transport> inner) {
                      return rank != frozen ? std::move(inner) : lose(std::move(inner), 25, [] {});
                    }});
    std::vector<Status> statuses(3);
    world.each_rank([&](int32_t r) {
      statuses[static_cast<size_t>(r)] =
          until_failure(world, r, {OpKind::Allreduce, OpKind::Alltoall}, 300);
    });
    check_lost(world, statuses, frozen);
  }
}

// Death while all are busy, with several threads of each rank in calls, some of which can't end.
void test_sudden_death() {
  Rng rng(7);
  for (int k = 0; k < 24; ++k) {
    const int32_t size = 2 + k % 3;
    const auto lost = static_cast<int32_t>(below(rng, size));
    const int64_t cut_at = below(rng, 40 * size);
    World world(size, {.plan = k % 2 == 0 ? Plan{} : tiny_plan()});
    std::atomic<int64_t> calls{0};
    world.each_rank([&](int32_t r) {
      std::thread other([&] {
        if (r == 0) return;  // so that this call of the others can't end well
        CHECK(attempt(world, r, {.name = "needs all", .counts = {2000}}).kind ==
              ErrorKind::PeerLost);
      });
      Status status;
      for (int i = 0; status.ok(); ++i) {
        if (calls.fetch_add(1) == cut_at) world.cut(lost);
        status = attempt(world, r, {.name = label("x", i % 3), .counts = {700}});
      }
      CHECK(status.kind == ErrorKind::PeerLost);
      other.join();
    });
  }
}

// Leaving with a reason, with calls in flight: the others learn who and why.
void test_leaving() {
  for (int k = 0; k < 16; ++k) {
    const int32_t size = 2 + k % 3, leaver = k % size;
    const std::string reason = k % 2 == 0 ? "KeyError: 'x'" : "its engine was destroyed";
    World world(size, {.plan = tiny_plan()});
    std::atomic<int32_t> ready{0};
    world.each_rank([&](int32_t r) {
      Job never = make_job({.name = "needs all", .counts = {900}}, r, size);
      if (r != leaver) submit(world[r], never);
      for (int i = 0; i < 5; ++i) {
        const Status status = attempt(world, r, {.name = "x", .counts = {900}});
        if (!status.ok()) check::fail(__FILE__, __LINE__, status.text.c_str());
      }
      Job last = make_job({.name = "last", .counts = {900}}, r, size);
      ++ready;
      if (r == leaver) {
        while (ready < size) std::this_thread::yield();  // what is under way may fail as well
        submit(world[r], last);
        world[r].shutdown(reason, Duration{});
        CHECK(!finish(world[r], last).ok());
        return;
      }
      const Status status = finish(world[r], never);
      CHECK(status.kind == ErrorKind::PeerLost);
      CHECK_EQ(status.rank, leaver);
      CHECK(status.text.find(reason) != std::string::npos);
    });
  }
}

// shutdown() of a rank while other threads of it submit, wait, poll and look in.
void test_shutdown_races() {
  constexpr int kThreads = 3;
  for (int k = 0; k < 20; ++k) {
    World world(2, {.plan = tiny_plan()});
    std::atomic<int> working{0};
    const auto work = [&](int32_t r, int t) {
      Status status;
      for (int i = 0; status.ok(); ++i) {
        if (i == 5) ++working;
        status = attempt(world, r, {.name = label("t", t), .counts = {300}});
        world[r].counters();
        world[r].pending();
        world[r].take_messages();
      }
      CHECK(status.kind == ErrorKind::Shutdown || status.kind == ErrorKind::PeerLost);
    };
    world.each_rank([&](int32_t r) {
      std::vector<std::thread> workers;
      for (int t = 0; t < kThreads; ++t) workers.emplace_back([&, r, t] { work(r, t); });
      while (working < 2 * kThreads) std::this_thread::yield();
      world[r].shutdown(k % 2 == 0 ? "" : "enough", 2s);
      for (std::thread& w : workers) w.join();
    });
  }
}

struct Test {
  const char* name;
  void (*run)();
};
constexpr Test kTests[] = {
    {"results", test_results},
    {"shared handles", test_shared_handles},
    {"nobody waits", test_nobody_waits},
    {"going on", test_going_on},
    {"long names", test_long_names},
    {"sleepers are woken", test_sleepers_are_woken},
    {"cycles", test_cycles},
    {"loss at every step", test_loss_at_every_step},
    {"freeze", test_freeze},
    {"sudden death", test_sudden_death},
    {"leaving", test_leaving},
    {"shutdown races", test_shutdown_races},
    {"overlapping sets", test_overlapping_sets},
};

}  // namespace
}  // namespace horovod::world

// Without arguments all tests, else those whose names are given.
int main(int count, char** arguments) {
  using Clock = std::chrono::steady_clock;
  for (const auto& test : horovod::world::kTests) {
    const bool wanted =
        count == 1 || std::any_of(arguments + 1, arguments + count,
                                  [&](char* name) { return std::string(test.name) == name; });
    if (!wanted) continue;
    const auto start = Clock::now();
    test.run();
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
    std::cout << test.name << ": " << took.count() << " ms" << std::endl;
  }
}
