// The laws of every algorithm, without a network: all ranks are stepped in a loop under the rules
// of schedule.h. Knows schedules only: no transport, no executor, no thread.
//
// A unit of data is one 64-byte line, and its content one number that says which rank's it is and
// where it lay. A fold is a hash that is neither commutative nor associative, so that its value
// proves the order of terms.
#include <algorithm>
#include <deque>
#include <iostream>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "check.h"
#include "core/algorithms.h"
#include "core/schedule.h"
#include "core/types.h"

namespace horovod {
namespace {

using Rng = std::mt19937_64;
using Vector = std::vector<uint64_t>;  // one number per line
using Bytes = std::vector<uint64_t>;   // counts of bytes, by rank

uint64_t segment_bytes = 0;  // what all schedules are made for; main() tries several
constexpr uint64_t kUnwritten = 0xdead;
constexpr size_t kMeshWindow = 64;

uint64_t tag(int32_t rank, uint64_t line) { return (static_cast<uint64_t>(rank) + 1) << 32 | line; }
uint64_t combine(uint64_t folded, uint64_t term) { return folded * 1000003 + term; }
uint64_t lines(uint64_t bytes) { return bytes / kAlignment; }

// What runs: one collective on all ranks, and what must come out.
struct Case {
  std::string name;
  int32_t size = 1;
  std::vector<Schedule> schedules;
  std::vector<Vector> in, expected;
  bool in_place = false;

  Place place(int32_t rank) const { return {rank, size, segment_bytes}; }
};

// How ranks take their turns and how far ahead they look.
struct Executor {
  const char* name;
  size_t window;  // steps after the first unfinished one that may run
  bool random;    // the ready step to run is drawn, else the first
  bool tight;     // the room for slots is the least that a transport may give
};
constexpr size_t kAll = ~size_t{0};
constexpr Executor kExecutors[] = {
    {"in order", 1, false, false},
    {"the first that is ready", kAll, false, false},
    {"any that is ready", kAll, true, false},
    {"like the mesh, little room", kMeshWindow, false, true},
};

struct Slot {
  uint64_t bytes = 0;
  uint64_t round = 0;  // of its arrival, if every slot takes one round and nothing else takes time
  Vector data;
};

// A ring of slots in the order of writing, freed in that order, each once all its readers have read
// it; a slot never wraps.
class Outbox {
 public:
  explicit Outbox(uint64_t capacity) : capacity_(capacity) {}

  bool reserve(uint64_t bytes, size_t readers) {
    if (capacity_ == 0) return true;
    while (!slots_.empty() && slots_.front().readers == 0) {
      tail_ = slots_.front().end;
      slots_.pop_front();
      ++first_;
    }
    if (slots_.empty()) tail_ = head_;
    const uint64_t offset = head_ % capacity_;
    const uint64_t begin = offset + bytes <= capacity_ ? head_ : head_ + (capacity_ - offset);
    if (begin + bytes - tail_ > capacity_) return false;
    head_ = begin + bytes;
    slots_.push_back({head_, readers});
    return true;
  }
  uint64_t last() const { return first_ + slots_.size() - 1; }
  void read(uint64_t slot) {
    if (capacity_ != 0) --slots_[slot - first_].readers;
  }

 private:
  struct Written {
    uint64_t end;
    size_t readers;
  };
  uint64_t capacity_, head_ = 0, tail_ = 0, first_ = 0;
  std::deque<Written> slots_;
};

// What a run has cost, for comparison with what the algorithms claim.
struct Cost {
  uint64_t rounds = 0;
  Bytes written, delivered,
      received;                 // by rank; a slot for m readers is written once, delivered m times
  std::vector<uint64_t> slots;  // written
};

class Simulation {
 public:
  Simulation(const Case& c, const Executor& executor, uint64_t seed)
      : case_(c), executor_(executor), rng_(seed), in_(c.in), channels_(pairs()), ids_(pairs()) {
    const auto n = static_cast<size_t>(c.size);
    for (size_t r = 0; r < n; ++r) out_.emplace_back(c.expected[r].size(), kUnwritten);
    outboxes_.assign(n, Outbox(executor.tight ? room() : 0));
    done_.resize(n);
    clock_.resize(n);
    finished_at_.resize(n);
    for (size_t r = 0; r < n; ++r) {
      done_[r].resize(c.schedules[r].steps.size());
      finished_at_[r].resize(c.schedules[r].steps.size());
    }
    cost_.written.resize(n);
    cost_.delivered.resize(n);
    cost_.received.resize(n);
    cost_.slots.resize(n);
  }

  Cost run() {
    std::vector<int32_t> order(static_cast<size_t>(case_.size));
    std::iota(order.begin(), order.end(), 0);
    for (bool moved = true; moved;) {
      moved = false;
      std::shuffle(order.begin(), order.end(), rng_);
      for (const int32_t r : order) {
        // A rank does one step, a few, or all it can before another has its turn.
        for (uint64_t turns = 1 + rng_() % 8; turns > 0 && step(r); --turns) moved = true;
      }
    }
    for (int32_t r = 0; r < case_.size; ++r) {
      const auto& done = done_[static_cast<size_t>(r)];
      const auto left = std::count(done.begin(), done.end(), false);
      if (left > 0) {
        std::cerr << "rank " << r << " can't do its last " << left << " of " << done.size()
                  << " steps\n";
        check::fail(__FILE__, __LINE__, describe().c_str());
      }
    }
    for (const auto& channel : channels_) CHECK(channel.empty());
    for (size_t r = 0; r < out_.size(); ++r) {
      const Vector& result = case_.in_place ? in_[r] : out_[r];
      if (result != case_.expected[r]) {
        std::cerr << "rank " << r << " has a wrong result\n";
        check::fail(__FILE__, __LINE__, describe().c_str());
      }
    }
    return cost_;
  }

 private:
  // Four slots of a segment, or of a line for each rank.
  uint64_t room() const {
    return 4 * std::max(segment_bytes, static_cast<uint64_t>(case_.size) * kAlignment);
  }
  size_t pairs() const { return static_cast<size_t>(case_.size * case_.size); }
  size_t pair(int32_t from, int32_t to) const {
    return static_cast<size_t>(from * case_.size + to);
  }
  std::string describe() const {
    return case_.name + " on " + std::to_string(case_.size) + " ranks, executor: " + executor_.name;
  }

  // Does one step of rank `r`, if one may run.
  bool step(int32_t r) {
    const Schedule& schedule = case_.schedules[static_cast<size_t>(r)];
    auto& done = done_[static_cast<size_t>(r)];
    const size_t first =
        static_cast<size_t>(std::find(done.begin(), done.end(), false) - done.begin());
    const size_t end =
        executor_.window > done.size() - first ? done.size() : first + executor_.window;
    bool sends_closed = false;
    std::vector<bool> receives_closed(static_cast<size_t>(case_.size));
    std::vector<size_t> ready;
    for (size_t i = first; i < end; ++i) {
      if (done[i]) continue;
      const Step& s = schedule.steps[i];
      const bool sends = s.kind == StepKind::Send || s.forward;
      const bool receives = s.kind == StepKind::Store || s.kind == StepKind::Fold;
      bool may = (s.after < 0 || done[static_cast<size_t>(s.after)]) && !(sends && sends_closed);
      for (const int32_t peer : schedule.peers_of(s)) {
        const auto y = static_cast<size_t>(peer);
        may = may && !(receives && (receives_closed[y] || channels_[pair(peer, r)].empty()));
      }
      if (may && executor_.tight && !executor_.random) {
        if (execute(r, i)) return true;
        may = false;
      }
      if (may) ready.push_back(i);
      // Later sends wait for this one, and so do later receives from the same rank.
      sends_closed = sends_closed || sends;
      for (const int32_t peer : schedule.peers_of(s)) {
        if (receives) receives_closed[static_cast<size_t>(peer)] = true;
      }
    }
    if (ready.empty()) return false;
    return execute(r, ready[executor_.random ? rng_() % ready.size() : 0]);
  }

  bool execute(int32_t r, size_t index) {
    const Schedule& schedule = case_.schedules[static_cast<size_t>(r)];
    const Step& s = schedule.steps[index];
    const auto peers = schedule.peers_of(s);
    Vector& in = in_[static_cast<size_t>(r)];
    Vector& out = case_.in_place ? in : out_[static_cast<size_t>(r)];
    const bool sends = s.kind == StepKind::Send || (s.forward && !peers.empty());
    if (sends && !outboxes_[static_cast<size_t>(r)].reserve(s.bytes, peers.size())) return false;

    // A step starts when all it needs is there; a rank that works in order also waits for itself.
    uint64_t& clock = clock_[static_cast<size_t>(r)];
    uint64_t now = executor_.window == 1 ? clock : 0;
    if (s.after >= 0) {
      now = std::max(now, finished_at_[static_cast<size_t>(r)][static_cast<size_t>(s.after)]);
    }
    std::vector<Slot> slots(static_cast<size_t>(case_.size));
    if (s.kind == StepKind::Store || s.kind == StepKind::Fold) {
      for (const int32_t peer : peers) {
        Slot slot = receive(r, peer);
        CHECK_EQ(slot.bytes, s.bytes);  // both sides run the same schedule
        now = std::max(now, slot.round);
        slots[static_cast<size_t>(peer)] = std::move(slot);
      }
    }
    const uint64_t count = lines(s.bytes), from = lines(s.in), to = lines(s.out);
    Vector data;
    for (uint64_t k = 0; k < count; ++k) {
      switch (s.kind) {
        case StepKind::Send:
          data.push_back(in.at(from + k));
          break;
        case StepKind::Store:
          out.at(to + k) = slots[static_cast<size_t>(peers.front())].data.at(k);
          break;
        case StepKind::Copy:
          out.at(to + k) = in.at(from + k);
          break;
        case StepKind::Fold: {
          uint64_t folded = 0;
          for (int32_t y = 0; y < case_.size; ++y) {
            const Slot& slot = slots[static_cast<size_t>(y)];
            folded = combine(folded, y == r ? in.at(from + k) : slot.data.at(k));
          }
          out.at(to + k) = folded;
          data.push_back(folded);
          break;
        }
      }
    }
    if (sends) send(r, peers, {s.bytes, now + 1, std::move(data)});
    clock = std::max(clock, now);
    cost_.rounds = std::max(cost_.rounds, now);
    finished_at_[static_cast<size_t>(r)][index] = now;
    done_[static_cast<size_t>(r)][index] = true;
    return true;
  }

  void send(int32_t from, std::span<const int32_t> to, const Slot& slot) {
    const auto r = static_cast<size_t>(from);
    cost_.written[r] += slot.bytes;
    cost_.delivered[r] += slot.bytes * to.size();
    ++cost_.slots[r];
    for (const int32_t peer : to) {
      channels_[pair(from, peer)].push_back(slot);
      ids_[pair(from, peer)].push_back(outboxes_[r].last());
    }
  }

  Slot receive(int32_t to, int32_t from) {
    auto& channel = channels_[pair(from, to)];
    auto& ids = ids_[pair(from, to)];
    Slot slot = std::move(channel.front());
    outboxes_[static_cast<size_t>(from)].read(ids.front());
    channel.pop_front();
    ids.pop_front();
    cost_.received[static_cast<size_t>(to)] += slot.bytes;
    return slot;
  }

  const Case& case_;
  const Executor& executor_;
  Rng rng_;
  std::vector<Vector> in_, out_;
  std::vector<std::deque<Slot>> channels_;  // by pair
  std::vector<std::deque<uint64_t>> ids_;   // of the slots in the writer's outbox
  std::vector<Outbox> outboxes_;
  std::vector<std::vector<bool>> done_;
  std::vector<uint64_t> clock_;
  std::vector<Vector> finished_at_;
  Cost cost_;
};

// ---- Collectives as cases
// -------------------------------------------------------------------------

uint64_t sum(const Bytes& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), uint64_t{0});
}

Vector tagged(int32_t rank, uint64_t bytes) {
  Vector v;
  for (uint64_t i = 0; i < lines(bytes); ++i) v.push_back(tag(rank, i));
  return v;
}

Vector folded(int32_t size, uint64_t bytes) {
  Vector v;
  for (uint64_t i = 0; i < lines(bytes); ++i) {
    uint64_t value = 0;
    for (int32_t y = 0; y < size; ++y) value = combine(value, tag(y, i));
    v.push_back(value);
  }
  return v;
}

Vector part(const Vector& whole, uint64_t begin, uint64_t bytes) {
  const auto first = whole.begin() + static_cast<ptrdiff_t>(lines(begin));
  return {first, first + static_cast<ptrdiff_t>(lines(bytes))};
}

template <typename Make>
Case each_rank(std::string name, int32_t size, Make&& make) {
  Case c{.name = std::move(name), .size = size, .schedules = {}, .in = {}, .expected = {}};
  for (int32_t r = 0; r < size; ++r) make(c, r);
  return c;
}

Case allreduce_case(bool direct, int32_t n, uint64_t bytes, bool in_place) {
  const auto* name = direct ? "allreduce_direct" : "allreduce_chunked";
  Case c = each_rank(name + (" of " + std::to_string(bytes)), n, [&](Case& to, int32_t r) {
    const auto algorithm = direct ? allreduce_direct : allreduce_chunked;
    to.schedules.push_back(algorithm(to.place(r), bytes));
    to.in.push_back(tagged(r, bytes));
    to.expected.push_back(folded(n, bytes));
  });
  c.in_place = in_place;
  return c;
}

Case reducescatter_case(const Bytes& chunks) {
  const auto n = static_cast<int32_t>(chunks.size());
  uint64_t begin = 0;
  return each_rank("reducescatter", n, [&](Case& to, int32_t r) {
    to.schedules.push_back(reducescatter(to.place(r), chunks));
    to.in.push_back(tagged(r, sum(chunks)));
    to.expected.push_back(part(folded(n, sum(chunks)), begin, chunks[static_cast<size_t>(r)]));
    begin += chunks[static_cast<size_t>(r)];
  });
}

Case allgather_case(const Bytes& chunks) {
  const auto n = static_cast<int32_t>(chunks.size());
  return each_rank("allgather", n, [&](Case& to, int32_t r) {
    to.schedules.push_back(allgather(to.place(r), chunks));
    to.in.push_back(tagged(r, chunks[static_cast<size_t>(r)]));
    Vector all;
    for (int32_t y = 0; y < n; ++y) {
      const Vector theirs = tagged(y, chunks[static_cast<size_t>(y)]);
      all.insert(all.end(), theirs.begin(), theirs.end());
    }
    to.expected.push_back(all);
  });
}

Case broadcast_case(int32_t n, int32_t root, uint64_t bytes, bool in_place) {
  Case c = each_rank("broadcast from " + std::to_string(root), n, [&](Case& to, int32_t r) {
    to.schedules.push_back(broadcast(to.place(r), root, bytes));
    to.in.push_back(tagged(r, bytes));
    to.expected.push_back(tagged(root, bytes));
  });
  c.in_place = in_place;
  return c;
}

Case alltoall_case(const std::vector<Bytes>& to_from) {  // [sender][receiver]
  const auto n = static_cast<int32_t>(to_from.size());
  return each_rank("alltoall", n, [&](Case& to, int32_t r) {
    const Bytes& sent = to_from[static_cast<size_t>(r)];
    Bytes received;
    Vector all;
    for (int32_t y = 0; y < n; ++y) {
      const Bytes& theirs = to_from[static_cast<size_t>(y)];
      const auto begin = std::accumulate(theirs.begin(), theirs.begin() + r, uint64_t{0});
      received.push_back(theirs[static_cast<size_t>(r)]);
      const Vector piece = part(tagged(y, sum(theirs)), begin, received.back());
      all.insert(all.end(), piece.begin(), piece.end());
    }
    to.schedules.push_back(alltoall(to.place(r), sent, received));
    to.in.push_back(tagged(r, sum(sent)));
    to.expected.push_back(all);
  });
}

// ---- The laws
// -------------------------------------------------------------------------------------

// What schedule.h promises of every schedule, before any step is run.
void check_form(const Case& c) {
  std::vector<Bytes> sent(static_cast<size_t>(c.size * c.size)), received = sent;
  for (int32_t r = 0; r < c.size; ++r) {
    const Schedule& schedule = c.schedules[static_cast<size_t>(r)];
    for (size_t i = 0; i < schedule.steps.size(); ++i) {
      const Step& s = schedule.steps[i];
      const auto peers = schedule.peers_of(s);
      CHECK(s.bytes > 0 && s.bytes % kAlignment == 0);
      CHECK(s.in % kAlignment == 0 && s.out % kAlignment == 0);
      CHECK(s.after < static_cast<int32_t>(i));
      CHECK(s.kind == StepKind::Copy || s.bytes <= segment_bytes);
      CHECK(s.kind != StepKind::Store || peers.size() == 1);
      CHECK(s.kind != StepKind::Send || !peers.empty());
      for (const int32_t peer : peers) {
        CHECK(peer >= 0 && peer < c.size && peer != r);
        CHECK_EQ(std::count(peers.begin(), peers.end(), peer), 1);
        const auto to = static_cast<size_t>(r * c.size + peer);
        const auto from = static_cast<size_t>(peer * c.size + r);
        if (s.kind == StepKind::Send || s.forward) sent[to].push_back(s.bytes);
        if (s.kind == StepKind::Store || s.kind == StepKind::Fold)
          received[from].push_back(s.bytes);
      }
    }
  }
  CHECK(sent == received);  // for every pair the same number, order and sizes
}

uint64_t cases = 0, runs = 0;

void check_case(const Case& c) {
  check_form(c);
  ++cases;
  for (const Executor& executor : kExecutors) {
    for (uint64_t seed = 0; seed < (executor.random ? 4 : 2); ++seed) {
      Simulation(c, executor, seed + cases).run();
      ++runs;
    }
  }
}

constexpr int32_t kSizes[] = {1, 2, 3, 4, 5, 6, 8};
std::vector<uint64_t> counts() {
  return {0,
          kAlignment,
          segment_bytes - kAlignment,
          segment_bytes,
          segment_bytes + kAlignment,
          3 * segment_bytes,
          7 * segment_bytes,
          5 * segment_bytes + 3 * kAlignment,
          23 * segment_bytes + kAlignment};
}

std::vector<Bytes> chunkings(int32_t n) {
  const auto size = static_cast<size_t>(n);
  std::vector<Bytes> all;
  for (const uint64_t bytes :
       {uint64_t{0}, kAlignment, segment_bytes, 3 * segment_bytes + kAlignment}) {
    all.emplace_back(size, bytes);
  }
  Rng rng(static_cast<uint64_t>(n));
  Bytes first(size), last(size), rising(size);
  first.front() = 5 * segment_bytes;
  last.back() = 2 * segment_bytes + kAlignment;
  for (size_t r = 0; r < size; ++r) rising[r] = r * segment_bytes * 3 / 4 / kAlignment * kAlignment;
  all.insert(all.end(), {first, last, rising});
  for (int k = 0; k < 4; ++k) {
    Bytes random(size);
    for (uint64_t& bytes : random) bytes = rng() % 3 == 0 ? 0 : rng() % 20 * kAlignment;
    all.push_back(random);
  }
  return all;
}

void test_values() {
  for (const int32_t n : kSizes) {
    for (const uint64_t bytes : counts()) {
      for (const bool in_place : {false, true}) {
        check_case(allreduce_case(true, n, bytes, in_place));
        check_case(allreduce_case(false, n, bytes, in_place));
        for (int32_t root = 0; root < n; ++root) {
          check_case(broadcast_case(n, root, bytes, in_place));
        }
      }
    }
    Rng rng(static_cast<uint64_t>(n));
    for (const Bytes& chunks : chunkings(n)) {
      check_case(reducescatter_case(chunks));
      check_case(allgather_case(chunks));
      // Every rank sends what its row says; the rows are rotations of one another, or the same.
      std::vector<Bytes> equal, rotated;
      for (int32_t r = 0; r < n; ++r) {
        equal.push_back(chunks);
        Bytes row = chunks;
        std::rotate(row.begin(), row.begin() + r, row.end());
        rotated.push_back(row);
      }
      check_case(alltoall_case(equal));
      check_case(alltoall_case(rotated));
    }
  }
}

Cost cost_of(const Case& c, const Executor& executor) { return Simulation(c, executor, 0).run(); }

// The numbers that algorithms.cc states, where the data divides evenly.
void test_costs() {
  const Executor &in_order = kExecutors[0], &eager = kExecutors[1];
  for (const int32_t n : {2, 3, 4, 5, 6, 8}) {
    const auto peers = static_cast<uint64_t>(n - 1), size = static_cast<uint64_t>(n);
    for (const uint64_t segments : {1, 2, 7}) {
      const uint64_t bytes = segments * segment_bytes;

      // One latency; each rank writes once what all read.
      Cost c = cost_of(allreduce_case(true, n, bytes, false), eager);
      CHECK_EQ(c.rounds, 1u);
      CHECK(c.written == Bytes(size, bytes));
      CHECK(c.received == Bytes(size, peers * bytes));
      CHECK(c.slots == std::vector<uint64_t>(size, segments));

      // 2 (n-1)/n x bytes in and out; the forwarded part is written once for all its readers. Two
      // latencies a segment if each waits for the one before; overlapped, two in all.
      Case chunked = allreduce_case(false, n, bytes, false);
      c = cost_of(chunked, eager);
      CHECK_EQ(c.rounds, 2u);
      CHECK_EQ(sum(c.received), 2 * peers * bytes);
      CHECK_EQ(sum(c.delivered), 2 * peers * bytes);
      CHECK_EQ(sum(c.written), size * bytes);
      CHECK(cost_of(chunked, in_order).rounds <= segments + 1);
      if (segment_bytes % (size * kAlignment) == 0) {
        CHECK(c.received == Bytes(size, 2 * peers * (bytes / size)));
        CHECK(c.delivered == Bytes(size, 2 * peers * (bytes / size)));
      }

      // (n-1)/n x bytes each way, one latency.
      c = cost_of(reducescatter_case(Bytes(size, bytes)), eager);
      CHECK_EQ(c.rounds, 1u);
      CHECK(c.written == Bytes(size, peers * bytes) && c.received == c.written);

      // Each chunk is written once and read by all the others.
      c = cost_of(allgather_case(Bytes(size, bytes)), eager);
      CHECK_EQ(c.rounds, 1u);
      CHECK(c.written == Bytes(size, bytes));
      CHECK(c.received == Bytes(size, peers * bytes));

      // One latency and bytes / segment slots, all of the root's.
      c = cost_of(broadcast_case(n, n - 1, bytes, false), eager);
      CHECK_EQ(c.rounds, 1u);
      CHECK_EQ(c.slots.back(), segments);
      CHECK_EQ(sum(c.slots), segments);
      CHECK_EQ(sum(c.received), peers * bytes);

      c = cost_of(alltoall_case(std::vector<Bytes>(size, Bytes(size, bytes))), eager);
      CHECK_EQ(c.rounds, 1u);
      CHECK(c.written == Bytes(size, peers * bytes) && c.received == c.written);
    }
  }
}

// In turn k rank r sends to r+k and receives from r-k, and at most four partners are served at
// once.
void test_rotation() {
  constexpr int32_t kRotate = 4;
  constexpr uint64_t kSegments = 3;
  for (const int32_t n : {2, 3, 5, 6, 8, 13}) {
    const auto size = static_cast<size_t>(n);
    const Case c = alltoall_case(std::vector<Bytes>(size, Bytes(size, kSegments * segment_bytes)));
    for (int32_t r = 0; r < n; ++r) {
      std::vector<int32_t> to, from;
      const Schedule& schedule = c.schedules[static_cast<size_t>(r)];
      for (const Step& s : schedule.steps) {
        if (s.kind == StepKind::Send) to.push_back(schedule.peers_of(s).front());
        if (s.kind == StepKind::Store) from.push_back(schedule.peers_of(s).front());
      }
      std::vector<int32_t> expected_to, expected_from;
      for (int32_t first = 1; first < n; first += kRotate) {
        for (uint64_t s = 0; s < kSegments; ++s) {
          for (int32_t k = first; k < std::min(first + kRotate, n); ++k) {
            expected_to.push_back((r + k) % n);
            expected_from.push_back((r - k + n) % n);
          }
        }
      }
      CHECK(to == expected_to);
      CHECK(from == expected_from);
    }
  }
}

// Positions and counts are 64 bits wide everywhere: what a schedule says of a large payload is what
// it says of a small one, times a factor, where both divide evenly. The small ones are what
// test_values() proves; the large ones pass 2^32 bytes in every piece, and by far in their sums.
void test_wide() {
  constexpr uint64_t kFactor = uint64_t{1} << 33;
  const uint64_t small = segment_bytes;
  const auto scaled = [](const Bytes& chunks) {
    Bytes wide;
    for (const uint64_t bytes : chunks) wide.push_back(bytes * kFactor);
    return wide;
  };
  for (const int32_t n : kSizes) {
    const auto even = static_cast<uint64_t>(n) * kAlignment;  // which n equal chunks divide
    Rng rng(static_cast<uint64_t>(n));
    Bytes chunks, others;
    for (int32_t r = 0; r < n; ++r) {
      chunks.push_back(rng() % 20 * kAlignment);
      others.push_back(rng() % 20 * kAlignment);
    }
    for (int32_t r = 0; r < n; ++r) {
      const auto check = [&](uint64_t segment, auto&& make) {
        Schedule narrow = make(Place{r, n, segment}, uint64_t{1});
        const Schedule wide = make(Place{r, n, segment * kFactor}, kFactor);
        CHECK(narrow.peers == wide.peers);
        CHECK_EQ(narrow.steps.size(), wide.steps.size());
        for (size_t i = 0; i < narrow.steps.size(); ++i) {
          Step& s = narrow.steps[i];
          s.in *= kFactor;
          s.out *= kFactor;
          s.bytes *= kFactor;
          CHECK(s == wide.steps[i]);
        }
      };
      for (const uint64_t bytes : {even, 3 * even, 7 * even}) {
        check(2 * even, [&](const Place& p, uint64_t k) { return allreduce_direct(p, bytes * k); });
        check(2 * even,
              [&](const Place& p, uint64_t k) { return allreduce_chunked(p, bytes * k); });
        check(small, [&](const Place& p, uint64_t k) { return broadcast(p, n - 1, bytes * k); });
      }
      const auto of = [&](const Bytes& b, uint64_t k) { return k == 1 ? b : scaled(b); };
      check(2 * even, [&](const Place& p, uint64_t k) { return reducescatter(p, of(chunks, k)); });
      check(small, [&](const Place& p, uint64_t k) { return allgather(p, of(chunks, k)); });
      check(small,
            [&](const Place& p, uint64_t k) { return alltoall(p, of(chunks, k), of(others, k)); });
    }
  }
}

}  // namespace
}  // namespace horovod

int main() {
  using namespace horovod;
  for (const uint64_t lines : {3, 4, 7, 16}) {
    segment_bytes = lines * kAlignment;
    test_values();
    test_costs();
    test_rotation();
    test_wide();
  }
  std::cout << cases << " cases in " << runs << " runs\n";
}
