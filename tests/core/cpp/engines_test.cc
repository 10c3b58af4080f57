// Whole engines as threads of one process, over real shared memory and real doorbells: what a
// sanitizer must see of the threads, the transport and the executor. Knows no Python.
//
// Segments are tiny here, so that small tensors already travel in several pieces.
#include <sys/socket.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <iostream>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/engine.h"
#include "core/kernels.h"
#include "core/shm.h"

namespace horovod {
namespace {

using namespace std::chrono_literals;

constexpr Duration kDeadline = 60s;

// ---- A world of ranks ---------------------------------------------------------------------------

struct Failed {
  Status status;
};

class Rank {
 public:
  Rank(int32_t rank, int32_t size, EngineOptions options)
      : rank_(rank), size_(size), engine_(std::move(options)) {}

  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }
  Engine& engine() { return engine_; }

  std::shared_ptr<LocalCall> finish(int64_t handle) {
    CHECK(engine_.wait(handle, kDeadline));
    auto call = engine_.take(handle);
    if (!call->status.ok()) throw Failed{call->status};
    return call;
  }
  std::shared_ptr<LocalCall> run(std::shared_ptr<LocalCall> call) {
    return finish(engine_.submit(std::move(call)));
  }

 private:
  int32_t rank_, size_;
  Engine engine_;
};

Plan small_plan() {
  Plan plan;
  plan.segment_bytes = 4 << 10;
  plan.outbox_bytes = 64 << 10;
  plan.direct_bytes = 512;
  return plan;
}

class World {
 public:
  explicit World(int32_t size, const Plan& plan = small_plan()) : ends_(static_cast<size_t>(size)) {
    const auto n = static_cast<size_t>(size);
    std::vector<Mapping> segments;
    std::vector<Descriptor> bells;
    std::vector<std::vector<Descriptor>> sockets(n);
    std::vector<std::string> names;
    for (size_t r = 0; r < n; ++r) {
      segments.push_back(anonymous_segment(segment_bytes(n, plan.outbox_bytes)));
      bells.push_back(make_event());
      sockets[r].resize(n);
      names.push_back("here, pid " + std::to_string(r));
    }
    for (size_t r = 0; r < n; ++r) {
      for (size_t y = 0; y < r; ++y) {
        int ends[2];
        CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
        sockets[r][y] = Descriptor(ends[0]);
        sockets[y][r] = Descriptor(ends[1]);
        ends_[r].push_back(duplicate(ends[0]));
        ends_[y].push_back(duplicate(ends[1]));
      }
    }
    for (size_t r = 0; r < n; ++r) {
      EngineOptions options;
      options.doorbell = duplicate(bells[r].get());
      options.peer_bells.resize(n);
      ShmOptions shm;
      shm.rank = static_cast<int32_t>(r);
      shm.outbox_bytes = plan.outbox_bytes;
      shm.segments = segments;
      for (size_t y = 0; y < n; ++y) {
        if (y != r) options.peer_bells[y] = duplicate(bells[y].get());
        shm.doorbells.push_back(y == r ? options.doorbell.get() : options.peer_bells[y].get());
      }
      options.sockets = std::move(sockets[r]);
      options.pidfds.resize(n);
      ProgressOptions& progress = options.progress;
      progress.rank = static_cast<int32_t>(r);
      progress.names = names;
      progress.plan = plan;
      progress.transport = make_shm(std::move(shm));
      progress.kernels = &kernels("auto");
      progress.heartbeat = 30s;
      ranks_.push_back(std::make_unique<Rank>(static_cast<int32_t>(r), size, std::move(options)));
    }
  }

  // Runs body(rank) on a thread for each rank.
  void run(const std::function<void(Rank&)>& body) {
    std::vector<std::thread> threads;
    for (auto& rank : ranks_) {
      threads.emplace_back([&body, &rank] {
        try {
          body(*rank);
        } catch (const Failed& failed) {
          std::cerr << "rank " << rank->rank() << ": " << failed.status.text << std::endl;
          std::_Exit(1);
        } catch (const std::exception& error) {
          std::cerr << "rank " << rank->rank() << ": " << error.what() << std::endl;
          std::_Exit(1);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }

  void leave() {
    run([](Rank& rank) { rank.engine().shutdown("", 5s); });
  }

  // What the others see of the end of `rank`: each of its connections reaches its end. It sees
  // nothing itself, for it would have words about it to say.
  void cut(int32_t rank) {
    for (const auto& end : ends_[static_cast<size_t>(rank)]) ::shutdown(end.get(), SHUT_WR);
  }

 private:
  std::vector<std::vector<Descriptor>> ends_;  // by rank: its ends of all its connections
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// ---- Calls --------------------------------------------------------------------------------------

template <class T>
struct TypeOf;
template <>
struct TypeOf<float> {
  static constexpr DType value = DType::Float32;
};
template <>
struct TypeOf<int64_t> {
  static constexpr DType value = DType::Int64;
};
template <>
struct TypeOf<uint8_t> {
  static constexpr DType value = DType::UInt8;
};

template <class T>
Tensor tensor(std::vector<T>& in, std::vector<T>* out, Shape shape) {
  return {reinterpret_cast<std::byte*>(in.data()),
          out != nullptr ? reinterpret_cast<std::byte*>(out->data()) : nullptr, TypeOf<T>::value,
          std::move(shape)};
}

std::shared_ptr<LocalCall> call(OpKind kind, std::string name, std::vector<Tensor> tensors = {}) {
  auto c = std::make_shared<LocalCall>();
  c->kind = kind;
  c->tensors = std::move(tensors);
  c->request.name = std::move(name);
  return c;
}

template <class T>
std::vector<T> result(const LocalCall& call) {
  const Output& output = call.outputs.at(0);
  CHECK_EQ(output.bytes % sizeof(T), size_t{0});
  std::vector<T> values(output.bytes / sizeof(T));
  std::copy_n(output.data.get(), output.bytes, reinterpret_cast<std::byte*>(values.data()));
  return values;
}

// What rank r has at place i; small, so that every sum is exact in every type.
template <class T>
T value(int32_t rank, size_t i) {
  return static_cast<T>((static_cast<size_t>(rank) + 1) * (i % 7 + 1) % 23);
}

template <class T>
std::vector<T> values(int32_t rank, size_t n) {
  std::vector<T> v(n);
  for (size_t i = 0; i < n; ++i) v[i] = value<T>(rank, i);
  return v;
}

template <class T>
std::vector<T> sum_of(int32_t size, size_t n) {
  std::vector<T> sum(n);
  for (int32_t r = 0; r < size; ++r) {
    for (size_t i = 0; i < n; ++i) sum[i] = static_cast<T>(sum[i] + value<T>(r, i));
  }
  return sum;
}

// ---- Laws ---------------------------------------------------------------------------------------

template <class T>
void all_collectives(Rank& rank, size_t n) {
  const int32_t me = rank.rank(), size = rank.size();
  const auto count = static_cast<int64_t>(n);
  const std::string suffix = "." + std::to_string(sizeof(T)) + "." + std::to_string(n);
  std::vector<T> in = values<T>(me, n), out(n);

  rank.run(call(OpKind::Allreduce, "sum" + suffix, {tensor(in, &out, {count})}));
  CHECK(out == sum_of<T>(size, n));
  CHECK(in == values<T>(me, n));

  std::vector<T> same = in;
  rank.run(call(OpKind::Allreduce, "in place" + suffix, {tensor(same, &same, {count})}));
  CHECK(same == sum_of<T>(size, n));

  const int32_t root = size - 1;
  auto broadcast = call(OpKind::Broadcast, "broadcast" + suffix, {tensor(in, &out, {count})});
  broadcast->root = root;
  rank.run(broadcast);
  CHECK(out == values<T>(root, n));

  // Rank r has n + r rows.
  std::vector<T> mine = values<T>(me, n + static_cast<size_t>(me)), all;
  for (int32_t r = 0; r < size; ++r) {
    const auto theirs = values<T>(r, n + static_cast<size_t>(r));
    all.insert(all.end(), theirs.begin(), theirs.end());
  }
  const Shape rows{static_cast<int64_t>(mine.size())};
  auto gathered = rank.run(call(OpKind::Allgather, "gather" + suffix, {tensor(mine, {}, rows)}));
  CHECK(result<T>(*gathered) == all);

  // Each rank sends n + r rows to rank r.
  std::vector<T> sent, received;
  auto exchange = call(OpKind::Alltoall, "exchange" + suffix);
  exchange->has_splits = true;
  for (int32_t r = 0; r < size; ++r) {
    const auto part = values<T>(me + r, n + static_cast<size_t>(r));
    sent.insert(sent.end(), part.begin(), part.end());
    exchange->splits.push_back(static_cast<int64_t>(part.size()));
    const auto theirs = values<T>(r + me, n + static_cast<size_t>(me));
    received.insert(received.end(), theirs.begin(), theirs.end());
  }
  exchange->tensors = {tensor(sent, {}, {static_cast<int64_t>(sent.size())})};
  const auto exchanged = rank.run(exchange);
  CHECK(result<T>(*exchanged) == received);
  CHECK(exchanged->received_splits == std::vector<int64_t>(size, count + me));

  auto scattered =
      rank.run(call(OpKind::Reducescatter, "scatter" + suffix, {tensor(in, {}, {count})}));
  const size_t even = n / size, more = n % size, r = static_cast<size_t>(me);
  const size_t begin = r * even + std::min(r, more), own = even + (r < more ? 1 : 0);
  const auto sum = sum_of<T>(size, n);
  CHECK(result<T>(*scattered) == std::vector<T>(sum.begin() + begin, sum.begin() + begin + own));
}

void collectives_are_right(int32_t size) {
  World world(size);
  world.run([&](Rank& rank) {
    // Nothing, less than a rank each, a prime, a bit more than a segment, several segments.
    for (size_t n : {0, 1, size - 1, size, 97, 1025, 9001}) {
      all_collectives<float>(rank, n);
      all_collectives<int64_t>(rank, n);
      all_collectives<uint8_t>(rank, n);
    }
    rank.run(call(OpKind::Barrier, "barrier"));
  });
  world.leave();
}

// Every rank submits the same names in its own order, and waits in another.
void order_of_submission_is_free(int32_t size) {
  World world(size);
  world.run([&](Rank& rank) {
    std::mt19937 random(static_cast<unsigned>(rank.rank()));
    constexpr size_t kCalls = 40;
    for (int round = 0; round < 5; ++round) {
      std::vector<std::vector<float>> data;
      for (size_t i = 0; i < kCalls; ++i) data.push_back(values<float>(rank.rank(), 1 + i * 53));
      std::vector<size_t> order(kCalls);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      std::vector<std::pair<size_t, int64_t>> handles;
      for (size_t i : order) {
        const Shape shape{static_cast<int64_t>(data[i].size())};
        auto c =
            call(OpKind::Allreduce, "g" + std::to_string(i), {tensor(data[i], &data[i], shape)});
        handles.emplace_back(i, rank.engine().submit(c));
      }
      std::shuffle(handles.begin(), handles.end(), random);
      for (const auto& [i, handle] : handles) {
        rank.engine().poll(handle);
        rank.finish(handle);
        CHECK(data[i] == sum_of<float>(size, data[i].size()));
      }
    }
  });
  world.leave();
}

// Several threads of each rank call at once, so that drivers hand over to each other.
void callers_share_an_engine(int32_t size) {
  World world(size);
  world.run([&](Rank& rank) {
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
      callers.emplace_back([&rank, size, caller] {
        for (int round = 0; round < 25; ++round) {
          std::vector<float> data = values<float>(rank.rank(), 1 + caller * 700);
          const Shape shape{static_cast<int64_t>(data.size())};
          rank.run(call(OpKind::Allreduce, "caller " + std::to_string(caller),
                        {tensor(data, &data, shape)}));
          CHECK(data == sum_of<float>(size, data.size()));
        }
      });
    }
    for (auto& caller : callers) caller.join();
  });
  world.leave();
}

// Calls complete without anybody waiting: the engine's own thread does it.
void engine_thread_drives(int32_t size) {
  World world(size);
  world.run([&](Rank& rank) {
    for (int round = 0; round < 10; ++round) {
      std::vector<float> data = values<float>(rank.rank(), 3000);
      auto c = call(OpKind::Allreduce, "polled", {tensor(data, &data, {3000})});
      const int64_t handle = rank.engine().submit(c);
      const auto end = std::chrono::steady_clock::now() + kDeadline;
      while (!rank.engine().poll(handle)) {
        CHECK(std::chrono::steady_clock::now() < end);
        std::this_thread::yield();
      }
      rank.finish(handle);
      CHECK(data == sum_of<float>(size, 3000));
    }
  });
  world.leave();
}

// Ranks that disagree all hear of it, and go on.
void disagreement_is_survived(int32_t size) {
  World world(size);
  world.run([&](Rank& rank) {
    std::vector<float> data(rank.rank() == 0 ? 4 : 5);
    const Shape shape{static_cast<int64_t>(data.size())};
    bool failed = false;
    try {
      rank.run(call(OpKind::Allreduce, "odd", {tensor(data, &data, shape)}));
    } catch (const Failed& failure) {
      failed = failure.status.kind == ErrorKind::Mismatch;
    }
    CHECK(failed);
    all_collectives<float>(rank, 97);
  });
  world.leave();
}

// A rank whose process ends is named on all others, in calls in flight and in later ones.
void loss_is_told_of(int32_t lost, int32_t size) {
  World world(size);
  world.run([&](Rank& rank) {
    rank.run(call(OpKind::Barrier, "before"));
    if (rank.rank() == lost) {
      world.cut(lost);
      return;
    }
    std::vector<float> data(1000);
    for (int attempt = 0; attempt < 2; ++attempt) {
      ErrorKind kind = ErrorKind::None;
      try {
        rank.run(call(OpKind::Allreduce, "after", {tensor(data, &data, {1000})}));
      } catch (const Failed& failure) {
        kind = failure.status.kind;
        CHECK_EQ(failure.status.rank, lost);
      } catch (const Error& error) {  // known already at submit
        kind = error.status().kind;
      }
      CHECK(kind == ErrorKind::PeerLost);
    }
  });
  world.run([](Rank& rank) { rank.engine().shutdown("", 1s); });
}

void loss_is_told(int32_t size) {
  loss_is_told_of(0, size);
  loss_is_told_of(size - 1, size);
}

void worlds_come_and_go(int32_t size) {
  for (int cycle = 0; cycle < 15; ++cycle) {
    World world(size);
    world.run([](Rank& rank) {
      std::vector<int64_t> data = values<int64_t>(rank.rank(), 100);
      rank.run(call(OpKind::Allreduce, "once", {tensor(data, &data, {100})}));
      CHECK(data == sum_of<int64_t>(rank.size(), 100));
    });
    world.leave();
  }
}

// The first rank has most to do; the others join and are left out.
void joined_ranks_are_left_out(int32_t size) {
  World world(size);
  world.run([&](Rank& rank) {
    for (int batch = 0; batch < (rank.rank() == 0 ? 6 : 3); ++batch) {
      std::vector<float> data(500, 1.0f);
      rank.run(
          call(OpKind::Allreduce, "batch " + std::to_string(batch), {tensor(data, &data, {500})}));
      const float contributors = batch < 3 ? static_cast<float>(size) : 1.0f;
      CHECK(data == std::vector<float>(500, contributors));
    }
    CHECK_EQ(rank.run(call(OpKind::Join, "join"))->value, int64_t{0});
  });
  world.leave();
}

int run_all() {
  const std::pair<const char*, void (*)(int32_t)> laws[] = {
      {"collectives are right", collectives_are_right},
      {"the order of submission is free", order_of_submission_is_free},
      {"callers share an engine", callers_share_an_engine},
      {"the engine thread drives", engine_thread_drives},
      {"disagreement is survived", disagreement_is_survived},
      {"loss is told", loss_is_told},
      {"worlds come and go", worlds_come_and_go},
      {"joined ranks are left out", joined_ranks_are_left_out},
  };
  for (const auto& [name, law] : laws) {
    for (int32_t size : {1, 2, 3, 4}) {
      if (size == 1 && (law == disagreement_is_survived || law == loss_is_told)) continue;
      std::cout << name << ", " << size << " ranks" << std::endl;
      law(size);
    }
  }
  return 0;
}

}  // namespace
}  // namespace horovod

int main() { return horovod::run_all(); }
