// The laws of allreduces whose terms travel inside the negotiation: the same bits as through slots,
// whatever the call, and the same errors. Threads as ranks; knows nothing of Python.
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "core/engine.h"
#include "world.h"

namespace horovod::world {
namespace {

constexpr uint64_t kLimit = 256;

Plan plan(uint64_t inline_bytes) {
  Plan p = tiny_plan();
  p.inline_bytes = inline_bytes;
  return p;
}

struct Part {
  DType dtype;
  int64_t count;
};

struct Case {
  std::vector<Part> parts;
  ReduceOp op = ReduceOp::Sum;
  double prescale = 1.0, postscale = 1.0;
  bool in_place = false;
  uint32_t set = 0;

  uint64_t bytes() const {
    uint64_t sum = 0;
    for (const Part& p : parts) sum += static_cast<uint64_t>(p.count) * info(p.dtype).size;
    return sum;
  }
};

// Any bits, but no NaN and no infinity: which NaN comes of several isn't promised.
std::vector<std::byte> numbers(const Part& part, uint64_t seed) {
  std::mt19937_64 rng(seed);
  const DTypeInfo& type = info(part.dtype);
  std::vector<std::byte> out(static_cast<size_t>(part.count) * type.size);
  for (std::byte& b : out) b = static_cast<std::byte>(rng());
  const size_t real = type.kind == DTypeClass::Complex ? type.size / 2u : type.size;
  for (size_t i = 0; i < out.size(); i += real) {
    if (type.kind == DTypeClass::Bool) out[i] &= std::byte{1};
    if (type.kind == DTypeClass::Float || type.kind == DTypeClass::Complex) {
      out[i + real - 1] &= std::byte{0xBF};
    }
  }
  return out;
}

using Result = std::vector<std::vector<std::byte>>;  // by tensor

// Makes the call and waits for it. Whoever is told when it is done waits from the start, so its
// announcement says so on every rank, and brings the payload along.
Result allreduce(Engine& engine, const Case& c, const std::string& name, int32_t rank,
                 Status* status = nullptr) {
  auto call = std::make_shared<LocalCall>();
  call->op = c.op;
  call->prescale = c.prescale;
  call->postscale = c.postscale;
  call->request.name = name;
  call->request.set = c.set;
  Result in, out;
  for (size_t t = 0; t < c.parts.size(); ++t) {
    in.push_back(numbers(c.parts[t], static_cast<uint64_t>(rank) * 100 + t));
    in.back().reserve(1);
    out.push_back(in.back());
    out.back().reserve(1);
    call->tensors.push_back({c.in_place ? out[t].data() : in[t].data(),
                             out[t].data(),
                             c.parts[t].dtype,
                             {c.parts[t].count}});
  }
  std::promise<Status> promise;
  std::future<Status> future = promise.get_future();
  call->when_done = [kept = std::make_shared<std::promise<Status>>(std::move(promise))](
                        LocalCall& it) { kept->set_value(it.status); };
  engine.submit(std::move(call));
  CHECK(future.wait_for(kDeadline) == std::future_status::ready);
  const Status ended = future.get();
  if (status != nullptr) {
    *status = ended;
  } else if (!ended.ok()) {
    check::fail(__FILE__, __LINE__, ended.text.c_str());
  }
  return out;
}

std::vector<Case> all_cases(size_t ranks) {
  std::vector<Case> cases;
  constexpr std::pair<double, double> kScales[] = {{1, 1}, {0.5, 1}, {1.7, 1.3}};
  for (size_t type = 0; type < kDTypes.size(); ++type) {
    const auto dtype = static_cast<DType>(type);
    const auto most = static_cast<int64_t>(kLimit / ranks / info(dtype).size);
    for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max,
                              ReduceOp::Product, ReduceOp::Adasum}) {
      if (!reduces(op, dtype)) continue;
      for (const auto& [pre, post] : kScales) {
        if (dtype == DType::Bool && pre != 1) continue;
        for (const int64_t count : {int64_t{0}, int64_t{1}, most, most + 1}) {
          cases.push_back({{{dtype, count}}, op, pre, post, cases.size() % 2 == 0, 0});
        }
      }
    }
  }
  // Groups; the second is misaligned everywhere.
  cases.push_back({{{DType::Float32, 3}, {DType::Float64, 2}, {DType::Float16, 5}}});
  cases.push_back({{{DType::UInt8, 1}, {DType::Float64, 2}, {DType::Bool, 3}, {DType::Int32, 1}}});
  cases.push_back({{{DType::Float32, 0}, {DType::BFloat16, 7}}, ReduceOp::Average});
  return cases;
}

bool is_inline(const Case& c, size_t ranks) {
  return c.op != ReduceOp::Adasum && c.bytes() > 0 && c.bytes() * ranks <= kLimit;
}

// Every case twice, in full and by its id: the bits are those of slots, and the way is the one that
// it has to be.
void test_bits() {
  for (const int32_t size : {1, 2, 3, 5}) {
    const std::vector<Case> cases = all_cases(static_cast<size_t>(size));
    const auto run = [&](uint64_t inline_bytes, uint64_t& inline_entries) {
      World world(size, {.plan = plan(inline_bytes)});
      std::vector<std::vector<Result>> results(static_cast<size_t>(size));
      world.each_rank([&](int32_t r) {
        for (size_t i = 0; i < cases.size(); ++i) {
          for (int turn = 0; turn < 2; ++turn) {
            results[static_cast<size_t>(r)].push_back(
                allreduce(world[r], cases[i], label("case.", static_cast<int>(i)), r));
          }
        }
      });
      inline_entries = world[0].counters()["inline_entries"];
      return results;
    };
    uint64_t none = 0, some = 0, expected = 0;
    CHECK(run(0, none) == run(kLimit, some));
    for (const Case& c : cases) expected += is_inline(c, static_cast<size_t>(size)) ? 2 : 0;
    CHECK_EQ(none, 0u);
    CHECK_EQ(some, expected);
  }
}

// A rank that nobody waits on sends no payload: then the data of all goes through slots.
void test_a_rank_without_payload() {
  World world(3, {.plan = plan(kLimit)});
  world.each_rank([&](int32_t r) {
    Job job = make_job({.name = "x", .counts = {5}}, r, 3);
    if (r != 1) return complete(world[r], (submit(world[r], job), job));
    submit(world[r], job);
    const auto until = std::chrono::steady_clock::now() + kDeadline;
    while (!world[r].poll(job.handle)) CHECK(std::chrono::steady_clock::now() < until);
    complete(world[r], job);
  });
  CHECK_EQ(world[0].counters()["inline_entries"], 0u);
}

// Average divides by the size of the set, whoever has joined; others' terms aren't missed.
void test_joined_ranks() {
  World world(3, {.plan = plan(kLimit)});
  const Case c{{{DType::Float32, 4}}, ReduceOp::Average};
  Result results[2];
  world.each_rank([&](int32_t r) {
    if (r < 2) results[r] = allreduce(world[r], c, "x", r);
    Job join = make_job({.kind = OpKind::Join, .name = "join"}, r, 3);
    submit(world[r], join);
    CHECK(finish(world[r], join).ok());
  });
  CHECK(results[0] == results[1]);
  const std::vector<std::byte> a = numbers(c.parts[0], 0), b = numbers(c.parts[0], 100);
  for (size_t i = 0; i < a.size(); i += sizeof(float)) {
    float x, y, z;
    std::memcpy(&x, &a[i], sizeof x);
    std::memcpy(&y, &b[i], sizeof y);
    std::memcpy(&z, &results[0][0][i], sizeof z);
    const float sum = x + y;
    CHECK_EQ(z, sum * static_cast<float>(1.0 / 3));
  }
  CHECK_EQ(world[0].counters()["inline_entries"], 1u);
}

// The limit counts the terms of the members of the set, and their order is theirs.
void test_process_sets() {
  World world(3, {.plan = plan(kLimit)});
  const std::vector<int32_t> members = {0, 2};
  world.each_rank([&](int32_t r) {
    auto add = std::make_shared<LocalCall>();
    add->kind = OpKind::AddSet;
    add->request.name = "add";
    add->request.ranks = members;
    const int64_t handle = world[r].submit(add);
    CHECK(world[r].wait(handle, kDeadline));
    const auto set = static_cast<uint32_t>(world[r].take(handle)->value);
    if (r == 1) return;
    for (int k = 0; k < 20; ++k) {
      Job job =
          make_job({.name = label("k", k), .counts = {32}, .set = set, .members = members}, r, 3);
      submit(world[r], job);
      complete(world[r], job);
    }
    allreduce(world[r], {.parts = {{DType::Int32, 32}}, .set = set}, "whole", r);
    allreduce(world[r], {.parts = {{DType::Int32, 33}}, .set = set}, "too large", r);
  });
  const uint64_t entries = world[0].counters()["inline_entries"];
  CHECK(entries >= 1 && entries <= 21);
}

// A disagreement is an error on every rank, and the name is free again.
void test_disagreement() {
  World world(2, {.plan = plan(kLimit)});
  world.each_rank([&](int32_t r) {
    for (int turn = 0; turn < 3; ++turn) {
      Status status;
      allreduce(world[r], {{{DType::Float32, r == 0 ? 4 : 5}}}, "x", r, &status);
      CHECK(status.kind == ErrorKind::Mismatch);
      const Case good{{{DType::Float32, 4}}};
      CHECK(allreduce(world[r], good, "x", r) == allreduce(world[r], good, "x", r));
    }
  });
  CHECK_EQ(world[1].counters()["inline_entries"], 6u);
}

}  // namespace
}  // namespace horovod::world

int main() {
  using namespace horovod::world;
  test_bits();
  test_a_rank_without_payload();
  test_joined_ranks();
  test_process_sets();
  test_disagreement();
}
