// The yard-stick of the allreduce benchmark: what this machine lets an allreduce between processes
// of one host cost; knows nothing of the product.
//
//   c++ -O3 -march=native -std=c++20 benchmarks/limit_shm.cc -o benchmarks/limit_shm
//   benchmarks/limit_shm [processes=2] [bytes ...]
//
// Prints the time of a barrier and, for each size, of
//   pass       one in-place pass over the data by all processes at once: read + write, the floor
//   memcpy     a copy of the data, by all processes at once
//   allreduce  in segments through two shared slots a process. Each process writes the chunks of
//              its peers into its slot, folds the peers' terms into its own chunk, publishes that,
//              and copies the others' results. 2 (n - 1) / n times the data crosses between
//              processes.
// No way to do that is best on all machines, or at all times on one. So there are several, which
// take turns: slots of several sizes, and stores into them past the caches or through them. The
// yard-stick is the fastest; the others follow it.
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr size_t kLine = 64 / sizeof(float);  // elements of a cache line
constexpr size_t kPage = 4096;
constexpr int kTurns = 5;

double now_s() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since).count();
}

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

double median(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

#if defined(__AVX512F__)
typedef float Vector __attribute__((vector_size(64), aligned(4)));
void stream(float* to, Vector v) { _mm512_stream_ps(to, (__m512)v); }
#elif defined(__AVX__)
typedef float Vector __attribute__((vector_size(32), aligned(4)));
void stream(float* to, Vector v) { _mm256_stream_ps(to, (__m256)v); }
#else
typedef float Vector __attribute__((vector_size(16), aligned(4)));
void stream(float* to, Vector v) {
#if defined(__x86_64__)
  _mm_stream_ps(to, (__m128)v);
#else
  *reinterpret_cast<Vector*>(to) = v;
#endif
}
#endif
constexpr size_t kLanes = sizeof(Vector) / sizeof(float);

Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }

void streams_done() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

void copy_to_slot(float* slot, const float* from, size_t n, bool streaming) {
  size_t i = 0;
  if (streaming) {
    for (; i + kLanes <= n; i += kLanes) stream(slot + i, load(from + i));
    streams_done();
  }
  std::memcpy(slot + i, from + i, (n - i) * sizeof(float));
}

// sum += term, and the sums to the slot.
void add_to_slot(float* sum, const float* term, float* slot, size_t n, bool streaming) {
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vector v = load(sum + i) + load(term + i);
    *reinterpret_cast<Vector*>(sum + i) = v;
    if (streaming) {
      stream(slot + i, v);
    } else {
      *reinterpret_cast<Vector*>(slot + i) = v;
    }
  }
  if (streaming) streams_done();
  for (; i < n; ++i) slot[i] = sum[i] += term[i];
}

// How to do it.
struct Way {
  size_t slot_bytes;
  bool streaming;
  const char* name;
};
constexpr Way kWays[] = {
    {256 << 10, false, "256 KiB ordinary"}, {256 << 10, true, "256 KiB streaming"},
    {1 << 20, false, "1 MiB ordinary"},     {1 << 20, true, "1 MiB streaming"},
    {4 << 20, true, "4 MiB streaming"},
};
constexpr size_t kMostSlotBytes = 4 << 20;

struct alignas(64) Position {
  std::atomic<uint32_t> value;
};

struct Slice {
  size_t begin, count;
};

// One process's sight of the shared memory: a position for each process, then two slots for each.
class Process {
 public:
  Process(char* memory, int rank, int size)
      : positions_(reinterpret_cast<Position*>(memory)),
        slots_(reinterpret_cast<float*>(memory + kPage)),
        rank_(rank),
        size_(size) {
    cpu_set_t cores;
    sched_getaffinity(0, sizeof cores, &cores);
    spins_ =
        size <= CPU_COUNT(&cores) ? 2000 : 0;  // spinning keeps the core from who is waited for
  }

  void barrier() {
    positions_[rank_].value.store(++round_, std::memory_order_release);
    for (int r = 0; r < size_; ++r) {
      for (int spins = 0; behind(r); ++spins) {
        if (spins < spins_) {
          pause();
        } else {
          sched_yield();
        }
      }
    }
  }

  void allreduce(float* data, size_t n, const Way& way) {
    slot_elements_ = way.slot_bytes / sizeof(float);
    streaming_ = way.streaming;
    for (size_t at = 0, half = 0; at < n; at += slot_elements_, half ^= 1) {
      reduce_segment(data + at, std::min(slot_elements_, n - at), half);
    }
  }

 private:
  bool behind(int r) const {
    const uint32_t reached = positions_[r].value.load(std::memory_order_acquire);
    return static_cast<int32_t>(reached - round_) < 0;
  }

  float* slot(int r, size_t half) const { return slots_ + (r * 2 + half) * slot_elements_; }

  Slice chunk(int r, size_t n) const {
    const size_t each = ((n + size_ - 1) / size_ + kLine - 1) / kLine * kLine;
    const size_t begin = std::min(n, r * each);
    return {begin, std::min(n, begin + each) - begin};
  }

  void reduce_segment(float* data, size_t n, size_t half) {
    float* const out = slot(rank_, half);
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const Slice theirs = chunk(r, n);
      copy_to_slot(out + theirs.begin, data + theirs.begin, theirs.count, streaming_);
    }
    barrier();
    const Slice own = chunk(rank_, n);
    float* const sum = data + own.begin;
    const int last = rank_ == size_ - 1 ? size_ - 2 : size_ - 1;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_ || r == last) continue;
      const float* term = slot(r, half) + own.begin;
      for (size_t i = 0; i < own.count; ++i) sum[i] += term[i];
    }
    add_to_slot(sum, slot(last, half) + own.begin, out + own.begin, own.count, streaming_);
    barrier();
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const Slice theirs = chunk(r, n);
      std::memcpy(data + theirs.begin, slot(r, half) + theirs.begin, theirs.count * sizeof(float));
    }
  }

  Position* positions_;
  float* slots_;
  int rank_, size_;
  size_t slot_elements_ = 0;
  bool streaming_ = false;
  int spins_;
  uint32_t round_ = 0;
};

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<float[], FreeDeleter>;

Buffer buffer(size_t bytes) {
  const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
  auto* memory = static_cast<float*>(std::aligned_alloc(kPage, rounded));
  if (memory != nullptr) std::memset(memory, 0, rounded);
  return Buffer(memory);
}

using WayTimes = std::array<std::vector<double>, std::size(kWays)>;

void print(size_t bytes, double pass, double copy, const WayTimes& times) {
  std::array<double, std::size(kWays)> medians;
  std::transform(times.begin(), times.end(), medians.begin(), median);
  const size_t best = std::min_element(medians.begin(), medians.end()) - medians.begin();
  std::printf("%10zu B: pass %9.1f us, memcpy %9.1f us, allreduce %9.1f us = %5.2f x pass (%s",
              bytes, pass * 1e6, copy * 1e6, medians[best] * 1e6, medians[best] / pass,
              kWays[best].name);
  for (size_t way = 0; way < std::size(kWays); ++way) {
    if (way != best) std::printf("; %s %.1f", kWays[way].name, medians[way] * 1e6);
  }
  std::printf(")\n");
  std::fflush(stdout);
}

bool measure(Process& process, int rank, int size, size_t bytes) {
  const size_t n = bytes / sizeof(float);
  const Buffer x = buffer(bytes), y = buffer(bytes);
  if (!x || !y) return false;
  const size_t runs = std::clamp<size_t>((16u << 20) / bytes, 2, 100);  // of a turn
  std::vector<double> pass, copy;
  WayTimes reduce;
  for (size_t run = 0; run < kTurns * runs; ++run) {
    process.barrier();
    const double start = now_s();
    for (size_t i = 0; i < n; ++i) x[i] *= 1.0000001f;
    process.barrier();
    const double passed = now_s();
    std::memcpy(y.get(), x.get(), bytes);
    process.barrier();
    pass.push_back(passed - start);
    copy.push_back(now_s() - passed);
  }
  for (int turn = 0; turn < kTurns; ++turn) {
    for (size_t way = 0; way < std::size(kWays); ++way) {
      for (size_t run = 0; run <= runs; ++run) {
        std::fill_n(x.get(), n, static_cast<float>(rank + 1));
        process.barrier();
        const double start = now_s();
        process.allreduce(x.get(), n, kWays[way]);
        // The first of a turn finds the slots where the way before has left them.
        if (run > 0) reduce[way].push_back(now_s() - start);
        const float expected = static_cast<float>(size * (size + 1)) / 2;
        if (!std::all_of(x.get(), x.get() + n, [=](float sum) { return sum == expected; })) {
          return false;
        }
        process.barrier();
      }
    }
  }
  if (rank == 0) print(bytes, median(pass), median(copy), reduce);
  return true;
}

bool run(Process& process, int rank, int size, const std::vector<size_t>& sizes) {
  std::vector<double> barriers;
  process.barrier();
  for (int k = 0; k < 20000; ++k) {
    const double start = now_s();
    process.barrier();
    barriers.push_back(now_s() - start);
  }
  if (rank == 0) std::printf("barrier %.2f us\n", median(barriers) * 1e6);
  for (size_t bytes : sizes) {
    if (!measure(process, rank, size, bytes)) {
      std::fprintf(stderr, "rank %d: no memory, or a wrong sum, at %zu bytes\n", rank, bytes);
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 2;
  if (size < 2 || size > static_cast<int>(kPage / sizeof(Position))) {
    std::fprintf(stderr, "2 to 64 processes\n");
    return 2;
  }
  std::vector<size_t> sizes;
  for (int i = 2; i < argc; ++i) {
    sizes.push_back(std::max<size_t>(std::strtoull(argv[i], nullptr, 10), sizeof(float)));
  }
  if (sizes.empty()) {
    sizes = {4,        1 << 10,  16 << 10,  256 << 10, 1 << 20,
             16 << 20, 64 << 20, 102228128, 437928960};  // the last two: ResNet-50 and BERT-base
  }
  const size_t bytes = kPage + size * 2 * kMostSlotBytes;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    return 1;
  }
  std::memset(memory, 0, bytes);
  int rank = size - 1;
  while (rank > 0 && fork() != 0) --rank;
  if (rank != 0) prctl(PR_SET_PDEATHSIG, SIGKILL);  // never outlive a first process that failed
  Process process(static_cast<char*>(memory), rank, size);
  if (!run(process, rank, size, sizes)) return 1;
  while (rank == 0 && wait(nullptr) > 0) {
  }
  return 0;
}
