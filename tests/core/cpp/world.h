// N engines as N ranks of one process, which share one mapping of each segment so that TSAN sees
// both sides; calls on them, and transports that lose a rank. Knows nothing of Python.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/engine.h"
#include "core/kernels.h"
#include "core/shm.h"

namespace horovod::world {

using namespace std::chrono_literals;

inline constexpr Duration kDeadline = 30s;  // of anything at all: sanitizers are slow

inline std::string label(const char* what, int k) {
  std::string name(what);
  name += std::to_string(k);
  return name;
}

// Small enough that slots wrap, rooms run out and one call takes many segments.
inline Plan tiny_plan() {
  return {.fusion_threshold_bytes = 1024,
          .segment_bytes = 256,
          .outbox_bytes = 4096,
          .direct_bytes = 512,
          .cache_capacity = 8};
}

// Hands on what another transport does.
class Decorator : public Transport {
 public:
  explicit Decorator(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}

  uint64_t max_slot_bytes() const override { return inner_->max_slot_bytes(); }
  std::byte* reserve(std::span<const int32_t> to, uint64_t bytes, bool oldest) override {
    return inner_->reserve(to, bytes, oldest);
  }
  void publish(Stores stores) override { inner_->publish(stores); }
  Arrival peek(int32_t from, uint64_t bytes) override { return inner_->peek(from, bytes); }
  void consume(int32_t from) override { inner_->consume(from); }
  size_t write_control(int32_t to, std::span<const std::byte> bytes) override {
    return inner_->write_control(to, bytes);
  }
  std::span<const std::byte> read_control(int32_t from) override {
    return inner_->read_control(from);
  }
  void consume_control(int32_t from, size_t bytes) override {
    inner_->consume_control(from, bytes);
  }
  void sleep(bool asleep) override { inner_->sleep(asleep); }
  bool idle() override { return inner_->idle(); }
  void ring_self() override { inner_->ring_self(); }
  void beat() override { inner_->beat(); }
  uint64_t beats_of(int32_t rank) override { return inner_->beats_of(rank); }

 protected:
  std::unique_ptr<Transport> inner_;
};

// Loses its rank at a step, counted in slots and control messages of both directions: from then on
// nothing gets in or out. `lost` is told once.
class Losing final : public Decorator {
 public:
  Losing(std::unique_ptr<Transport> inner, int step, std::function<void()> lost)
      : Decorator(std::move(inner)), left_(step), lost_(std::move(lost)) {}

  std::byte* reserve(std::span<const int32_t> to, uint64_t bytes, bool oldest) override {
    return dead() ? nullptr : Decorator::reserve(to, bytes, oldest);
  }
  void publish(Stores stores) override {
    Decorator::publish(stores);
    count();
  }
  Arrival peek(int32_t from, uint64_t bytes) override {
    return dead() ? Arrival{} : Decorator::peek(from, bytes);
  }
  void consume(int32_t from) override {
    Decorator::consume(from);
    count();
  }
  size_t write_control(int32_t to, std::span<const std::byte> bytes) override {
    if (dead()) return 0;
    const size_t n = Decorator::write_control(to, bytes);
    count();
    return n;
  }
  std::span<const std::byte> read_control(int32_t from) override {
    return dead() ? std::span<const std::byte>{} : Decorator::read_control(from);
  }
  void consume_control(int32_t from, size_t bytes) override {
    Decorator::consume_control(from, bytes);
    count();
  }
  bool idle() override { return dead() || Decorator::idle(); }
  void beat() override {
    if (!dead()) Decorator::beat();
  }
  uint64_t beats_of(int32_t rank) override { return dead() ? 0 : Decorator::beats_of(rank); }

 private:
  bool dead() const { return left_ <= 0; }
  void count() {
    if (--left_ == 0) lost_();
  }

  int left_;
  std::function<void()> lost_;
};

inline std::unique_ptr<Transport> lose(std::unique_ptr<Transport> inner, int step,
                                       std::function<void()> lost) {
  return std::make_unique<Losing>(std::move(inner), step, std::move(lost));
}

struct Limits {
  Duration stall_warning{}, stall_shutdown{}, deadlock{}, heartbeat{};
};

struct Options {
  Plan plan = {};
  const char* simd = "auto";
  Limits limits = {};
  // May put something between a rank and its transport.
  std::function<std::unique_ptr<Transport>(int32_t rank, std::unique_ptr<Transport>)> wrap = {};
};

class World {
 public:
  World(int32_t size, const Options& options) : sockets_(static_cast<size_t>(size)) {
    const auto n = static_cast<size_t>(size);
    std::vector<Mapping> segments;
    std::vector<Descriptor> bells;
    std::vector<std::string> names;
    std::vector<std::vector<Descriptor>> links(n);
    for (size_t r = 0; r < n; ++r) {
      segments.push_back(anonymous_segment(segment_bytes(n, options.plan.outbox_bytes)));
      bells.push_back(make_event());
      names.push_back(label("host, pid ", static_cast<int>(r)));
      links[r].resize(n);
      sockets_[r].resize(n);
    }
    for (size_t r = 0; r < n; ++r) {
      for (size_t y = 0; y < r; ++y) {
        int ends[2];
        CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
        links[r][y] = Descriptor(ends[0]);
        links[y][r] = Descriptor(ends[1]);
        sockets_[r][y] = duplicate(ends[0]);
        sockets_[y][r] = duplicate(ends[1]);
      }
    }
    for (size_t r = 0; r < n; ++r) {
      const auto rank = static_cast<int32_t>(r);
      EngineOptions o;
      o.doorbell = duplicate(bells[r].get());
      ShmOptions shm{.rank = rank,
                     .outbox_bytes = options.plan.outbox_bytes,
                     .segments = segments,
                     .doorbells = {}};
      for (size_t y = 0; y < n; ++y) {
        o.peer_bells.push_back(y == r ? Descriptor() : duplicate(bells[y].get()));
        shm.doorbells.push_back(y == r ? o.doorbell.get() : o.peer_bells[y].get());
      }
      o.sockets = std::move(links[r]);
      o.pidfds.resize(n);
      ProgressOptions& p = o.progress;
      p.rank = rank;
      p.names = names;
      p.plan = options.plan;
      p.kernels = &kernels(options.simd);
      p.transport = make_shm(std::move(shm));
      if (options.wrap) p.transport = options.wrap(rank, std::move(p.transport));
      p.stall_warning = options.limits.stall_warning;
      p.stall_shutdown = options.limits.stall_shutdown;
      p.deadlock = options.limits.deadlock;
      p.heartbeat = options.limits.heartbeat;
      engines_.push_back(std::make_unique<Engine>(std::move(o)));
    }
  }

  ~World() { shutdown(); }

  int32_t size() const { return static_cast<int32_t>(engines_.size()); }
  Engine& operator[](int32_t rank) { return *engines_[static_cast<size_t>(rank)]; }

  // Ends the connections of a rank, as if its process had died.
  void cut(int32_t rank) {
    for (const Descriptor& socket : sockets_[static_cast<size_t>(rank)]) {
      if (socket.get() >= 0) ::shutdown(socket.get(), SHUT_RDWR);
    }
  }

  // body(rank) in a thread per rank.
  template <typename Body>
  void each_rank(Body&& body) {
    std::vector<std::thread> threads;
    for (int32_t r = 0; r < size(); ++r) threads.emplace_back([&body, r] { body(r); });
    for (std::thread& t : threads) t.join();
  }

  void shutdown() {
    each_rank([&](int32_t r) { (*this)[r].shutdown("", 2s); });
  }

 private:
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::vector<Descriptor>> sockets_;  // the same connections as the engines', by pair
};

// ---- Calls
// ----------------------------------------------------------------------------------------

// A call whose results are known. All numbers are small integers, so every dtype holds them
// exactly.
struct Job {
  std::shared_ptr<LocalCall> call = std::make_shared<LocalCall>();
  std::vector<std::vector<std::byte>> memory;    // inputs and outputs
  std::vector<std::vector<std::byte>> expected;  // of each tensor
  int64_t handle = 0;
};

// What a job does; the same on all ranks.
struct Plot {
  OpKind kind = OpKind::Allreduce;
  ReduceOp op = ReduceOp::Sum;
  DType dtype = DType::Int32;  // Int32, Float32 or Int64
  std::string name;
  std::vector<int64_t> counts = {1};  // elements of each tensor; rows of each rank for the others
  bool in_place = false;
  bool unnamed = false;
  int32_t root = 0;
  uint32_t set = 0;
  std::vector<int32_t> members = {};  // empty: all ranks
};

// For Adasum they are equal on all ranks: then its result is what they are.
inline int64_t input(const Plot& plot, int32_t rank, size_t tensor, int64_t i) {
  if (plot.op == ReduceOp::Adasum) rank = 0;
  return (rank * 7 + static_cast<int64_t>(tensor) * 5 + i * 3 +
          static_cast<int64_t>(plot.name.size())) %
         11;
}

inline void put(DType dtype, std::vector<std::byte>& to, int64_t value) {
  const auto append = [&](auto v) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&v);
    to.insert(to.end(), bytes, bytes + sizeof v);
  };
  if (dtype == DType::Int32) return append(static_cast<int32_t>(value));
  if (dtype == DType::Int64) return append(value);
  CHECK(dtype == DType::Float32);
  append(static_cast<float>(value));
}

// Rows that rank `from` sends to the member at place `to` in an alltoall.
inline int64_t split(const Plot& plot, int32_t from, size_t to) {
  return (plot.counts[0] + from * 3 + static_cast<int64_t>(to) * 5) % (plot.counts[0] + 4);
}

// Rank `r`'s rows of tensor `t` in a gather: uneven, and none for some.
inline int64_t gathered(const Plot& plot, int32_t r, size_t t) {
  return (r + static_cast<int64_t>(t)) % 3 == 1 ? 0 : plot.counts[t] + r;
}

inline int64_t reduce(const Plot& plot, const std::vector<int32_t>& members, size_t t, int64_t i) {
  int64_t result = input(plot, members.front(), t, i);
  if (plot.op == ReduceOp::Adasum) return result;
  for (size_t m = 1; m < members.size(); ++m) {
    const int64_t x = input(plot, members[m], t, i);
    if (plot.op == ReduceOp::Min)
      result = std::min(result, x);
    else if (plot.op == ReduceOp::Max)
      result = std::max(result, x);
    else if (plot.op == ReduceOp::Product)
      result *= x;
    else
      result += x;
  }
  return result;
}

// The call of `rank` of `size`.
inline Job make_job(const Plot& plot, int32_t rank, int32_t size) {
  Job job;
  LocalCall& call = *job.call;
  call.kind = plot.kind;
  call.op = plot.op;
  call.root = plot.root;
  call.request.name = plot.name;
  call.request.set = plot.set;
  call.request.unnamed = plot.unnamed;
  std::vector<int32_t> members = plot.members;
  for (int32_t r = 0; plot.members.empty() && r < size; ++r) members.push_back(r);
  const auto n = static_cast<int64_t>(members.size());
  const auto me = std::find(members.begin(), members.end(), rank) - members.begin();
  if (plot.kind == OpKind::Alltoall) {
    call.has_splits = true;
    for (size_t m = 0; m < members.size(); ++m) call.splits.push_back(split(plot, rank, m));
  }
  for (size_t t = 0; info(plot.kind).moves_data && t < plot.counts.size(); ++t) {
    std::vector<std::byte> in, expected;
    int64_t rows = plot.counts[t];
    switch (plot.kind) {
      case OpKind::Allreduce:
        for (int64_t i = 0; i < rows; ++i) put(plot.dtype, expected, reduce(plot, members, t, i));
        break;
      case OpKind::Broadcast:
        for (int64_t i = 0; i < rows; ++i) put(plot.dtype, expected, input(plot, plot.root, t, i));
        break;
      case OpKind::Allgather:
        rows = gathered(plot, rank, t);
        for (const int32_t y : members) {
          for (int64_t i = 0; i < gathered(plot, y, t); ++i) {
            put(plot.dtype, expected, input(plot, y, t, i));
          }
        }
        break;
      case OpKind::Reducescatter: {
        const int64_t first = rows / n * me + std::min<int64_t>(me, rows % n);
        const int64_t mine = rows / n + (me < rows % n ? 1 : 0);
        for (int64_t i = first; i < first + mine; ++i) {
          put(plot.dtype, expected, reduce(plot, members, t, i));
        }
        break;
      }
      default: {  // alltoall
        rows = 0;
        for (const int64_t to : call.splits) rows += to;
        for (const int32_t y : members) {
          int64_t first = 0;
          for (size_t m = 0; m < static_cast<size_t>(me); ++m) first += split(plot, y, m);
          for (int64_t i = 0; i < split(plot, y, static_cast<size_t>(me)); ++i) {
            put(plot.dtype, expected, input(plot, y, t, first + i));
          }
        }
      }
    }
    for (int64_t i = 0; i < rows; ++i) put(plot.dtype, in, input(plot, rank, t, i));
    in.reserve(1);  // memory even if it is empty
    Tensor tensor{.in = in.data(), .out = nullptr, .dtype = plot.dtype, .shape = {rows}};
    job.memory.push_back(std::move(in));
    if (plot.in_place && (plot.kind == OpKind::Allreduce || plot.kind == OpKind::Broadcast)) {
      tensor.out = tensor.in;
    }
    call.tensors.push_back(tensor);
    job.expected.push_back(std::move(expected));
  }
  return job;
}

inline void submit(Engine& engine, Job& job) { job.handle = engine.submit(job.call); }

// Waits for a job and takes it; its status.
inline Status finish(Engine& engine, Job& job) {
  CHECK(engine.wait(job.handle, kDeadline));
  const LocalCallPtr call = engine.take(job.handle);
  CHECK(call == job.call);
  return call->status;
}

inline void check_result(const Job& job) {
  const LocalCall& call = *job.call;
  size_t allocated = 0;
  for (size_t t = 0; t < call.tensors.size(); ++t) {
    const std::vector<std::byte>& expected = job.expected[t];
    const std::byte* out = call.tensors[t].out;
    if (out == nullptr) {
      const Output& output = call.outputs.at(allocated++);
      CHECK_EQ(output.bytes, expected.size());
      out = output.data.get();
    }
    if (!expected.empty() && std::memcmp(out, expected.data(), expected.size()) != 0) {
      std::cerr << info(call.kind).name << " \"" << call.request.name << "\", tensor " << t
                << " of " << call.tensors.size() << ", " << expected.size() << " bytes\n";
      check::fail(__FILE__, __LINE__, "the result is right");
    }
  }
}

inline void complete(Engine& engine, Job& job) {
  const Status status = finish(engine, job);
  if (!status.ok()) check::fail(__FILE__, __LINE__, status.text.c_str());
  check_result(job);
}

}  // namespace horovod::world
