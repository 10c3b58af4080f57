// The executor over real outboxes, all ranks in one thread: no run stops for ever. Knows no engine
// and no thread, and leaves results to others.
#include "core/mesh.h"

#include <algorithm>
#include <functional>
#include <iostream>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "check.h"
#include "core/algorithms.h"
#include "core/shm.h"
#include "world.h"

namespace horovod {
namespace {

constexpr uint64_t kSegmentBytes = 256, kOutboxBytes = 4096;
constexpr uint64_t kBytes = 100 * kAlignment;  // of each rank's vector, or for each rank

using Algorithm = std::function<Schedule(const Place&)>;

struct Case {
  const char* name;
  Algorithm make;
};

std::vector<uint64_t> chunks(const Place& place) {
  return std::vector<uint64_t>(static_cast<size_t>(place.size), kBytes);
}

const Case kCases[] = {
    {"allreduce_direct", [](const Place& p) { return allreduce_direct(p, kBytes); }},
    {"allreduce_chunked", [](const Place& p) { return allreduce_chunked(p, kBytes); }},
    {"reducescatter", [](const Place& p) { return reducescatter(p, chunks(p)); }},
    {"allgather", [](const Place& p) { return allgather(p, chunks(p)); }},
    {"broadcast", [](const Place& p) { return broadcast(p, p.size - 1, kBytes); }},
    {"alltoall", [](const Place& p) { return alltoall(p, chunks(p), chunks(p)); }},
};

// Refuses room now and then that comes just after it was looked for; the first time surely, so that
// all ranks find none at once.
class Late final : public world::Decorator {
 public:
  Late(std::unique_ptr<Transport> inner, uint64_t seed) : Decorator(std::move(inner)), rng_(seed) {}

  std::byte* reserve(std::span<const int32_t> to, uint64_t bytes, bool oldest) override {
    const bool late = std::exchange(first_, false) || rng_() % 8 == 0;
    refused_ = refused_ || late;
    return late ? nullptr : Decorator::reserve(to, bytes, oldest);
  }
  bool idle() override { return !std::exchange(refused_, false) && Decorator::idle(); }

 private:
  std::mt19937_64 rng_;
  bool first_ = true, refused_ = false;
};

// A rank that runs one schedule.
struct Rank {
  Rank(std::unique_ptr<Transport> over, Schedule schedule, const Place& place)
      : transport(std::move(over)),
        mesh(*transport, kernels("baseline"), static_cast<size_t>(place.size)),
        in(kBytes * static_cast<uint64_t>(place.size)),
        out(in.size()) {
    run.schedule = std::move(schedule);
    run.in = VirtualVector({{in.data(), in.size(), DType::UInt8}});
    run.out = VirtualVector({{out.data(), out.size(), DType::UInt8}});
    run.group.resize(static_cast<size_t>(place.size));
    std::iota(run.group.begin(), run.group.end(), 0);
  }
  bool pass() {
    mesh.begin_pass();
    return mesh.advance(run, /*oldest=*/true);
  }

  std::unique_ptr<Transport> transport;
  Mesh mesh;
  std::vector<std::byte> in, out;
  Run run;
};

// Room comes just after a rank looked for it, as it does when readers run meanwhile. Whoever goes
// on with another send instead may fill the outbox with slots that nobody can use yet.
void test_late_room(const Case& c, int32_t size, uint64_t seed) {
  std::vector<Descriptor> bells;
  ShmOptions options;
  options.outbox_bytes = kOutboxBytes;
  for (int32_t r = 0; r < size; ++r) {
    options.segments.push_back(
        anonymous_segment(segment_bytes(static_cast<size_t>(size), kOutboxBytes)));
    options.doorbells.push_back(bells.emplace_back(make_event()).get());
  }
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int32_t r = 0; r < size; ++r) {
    options.rank = r;
    const Place place{r, size, kSegmentBytes};
    auto late = std::make_unique<Late>(make_shm(options), seed * 100 + static_cast<uint64_t>(r));
    ranks.push_back(std::make_unique<Rank>(std::move(late), c.make(place), place));
  }
  std::mt19937_64 rng(seed);
  const auto finished = [](const auto& rank) { return rank->run.finished(); };
  while (!std::all_of(ranks.begin(), ranks.end(), finished)) {
    std::shuffle(ranks.begin(), ranks.end(), rng);
    bool alive = false;
    for (const auto& rank : ranks) {
      if (!finished(rank)) alive = rank->pass() || !rank->transport->idle() || alive;
    }
    if (!alive) {
      std::cerr << c.name << " on " << size << " ranks, seed " << seed << "\n";
      check::fail(__FILE__, __LINE__, "some rank can go on");
    }
  }
}

}  // namespace
}  // namespace horovod

int main() {
  int runs = 0;
  for (const auto& c : horovod::kCases) {
    for (const int32_t size : {2, 3, 4, 5, 6, 8}) {
      for (uint64_t seed = 0; seed < 8; ++seed, ++runs) horovod::test_late_room(c, size, seed);
    }
  }
  std::cout << runs << " runs\n";
}
