// The yard-stick of the allreduce benchmark: what this machine lets an allreduce between processes
// of one host cost; knows nothing of the product.
//
//   c++ -O3 -march=native -std=c++20 benchmarks/limit_shm.cc -o benchmarks/limit_shm
//   benchmarks/limit_shm [processes=2] [slot_bytes=4194304] [streaming=1] [bytes ...]
//
// Prints the time of a barrier and, for each size, of
//   pass       one in-place pass over the data by all processes at once: read + write, the floor
//   memcpy     a copy of the data, by all processes at once
//   allreduce  in segments through two shared slots a process. Each process writes the chunks of
//   its peers into its
//              slot, folds the peers' terms into its own chunk, publishes that, and copies the
//              others' results. 2 (n - 1) / n times the data crosses between processes. `streaming`
//              chooses the stores into slots: 1 past the caches, 0 ordinary.
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr size_t kLine = 64 / sizeof(float);  // elements of a cache line
constexpr size_t kPage = 4096;

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

// A cache line in registers: one, two or four of them, as the processor has it.
typedef float Line __attribute__((vector_size(64), aligned(4)));

Line load(const float* from) { return *reinterpret_cast<const Line*>(from); }

// Stores a whole cache line, at a boundary of 64 bytes, past the caches.
void stream(float* to, Line line) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, (__m512)line);
#elif defined(__x86_64__)
  for (size_t k = 0; k < kLine; k += 4) {
    _mm_stream_ps(to + k, _mm_set_ps(line[k + 3], line[k + 2], line[k + 1], line[k]));
  }
#else
  *reinterpret_cast<Line*>(to) = line;
#endif
}

void streams_done() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

void copy_to_slot(float* slot, const float* from, size_t n, bool streaming) {
  size_t i = 0;
  if (streaming) {
    for (; i + kLine <= n; i += kLine) stream(slot + i, load(from + i));
    streams_done();
  }
  std::memcpy(slot + i, from + i, (n - i) * sizeof(float));
}

// sum += term, and the sums to the slot.
void add_to_slot(float* sum, const float* term, float* slot, size_t n, bool streaming) {
  size_t i = 0;
  if (streaming) {
    for (; i + kLine <= n; i += kLine) {
      const Line line = load(sum + i) + load(term + i);
      *reinterpret_cast<Line*>(sum + i) = line;
      stream(slot + i, line);
    }
    streams_done();
  }
  for (size_t k = i; k < n; ++k) sum[k] += term[k];
  std::memcpy(slot + i, sum + i, (n - i) * sizeof(float));
}

struct alignas(64) Position {
  std::atomic<uint32_t> value;
};

struct Slice {
  size_t begin, count;
};

// One process's sight of the shared memory: a position for each process, then two slots for each.
class Process {
 public:
  Process(char* memory, int rank, int size, size_t slot_elements, bool streaming)
      : positions_(reinterpret_cast<Position*>(memory)),
        slots_(reinterpret_cast<float*>(memory + kPage)),
        rank_(rank),
        size_(size),
        slot_elements_(slot_elements),
        streaming_(streaming) {
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

  void allreduce(float* data, size_t n) {
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
  size_t slot_elements_;
  bool streaming_;
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

bool measure(Process& process, int rank, int size, size_t bytes) {
  const size_t n = bytes / sizeof(float);
  const Buffer x = buffer(bytes), y = buffer(bytes);
  if (!x || !y) return false;
  const size_t runs =
      std::max<size_t>(bytes > (200u << 20) ? 5 : 9, std::min<size_t>(2000, (256u << 20) / bytes));
  std::vector<double> pass, copy, reduce;
  for (size_t run = 0; run < runs; ++run) {
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
  for (size_t run = 0; run < runs; ++run) {
    std::fill_n(x.get(), n, static_cast<float>(rank + 1));
    process.barrier();
    const double start = now_s();
    process.allreduce(x.get(), n);
    reduce.push_back(now_s() - start);
    const float expected = static_cast<float>(size * (size + 1)) / 2;
    if (!std::all_of(x.get(), x.get() + n, [=](float sum) { return sum == expected; }))
      return false;
    process.barrier();
  }
  if (rank == 0) {
    const double p = median(pass), c = median(copy), r = median(reduce);
    std::printf(
        "%10zu B: pass %9.1f us, memcpy %9.1f us, allreduce %9.1f us = %5.2f x pass, %6.2f GB/s\n",
        bytes, p * 1e6, c * 1e6, r * 1e6, r / p,
        2.0 * (size - 1) / size * static_cast<double>(bytes) / r / 1e9);
    std::fflush(stdout);
  }
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
  const size_t slot_bytes = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 4u << 20;
  const bool streaming = argc > 3 ? std::atoi(argv[3]) != 0 : true;
  if (size < 2 || size > static_cast<int>(kPage / sizeof(Position)) || slot_bytes % kPage != 0 ||
      slot_bytes == 0) {
    std::fprintf(stderr, "2 to 64 processes; slots of whole pages of %zu bytes\n", kPage);
    return 2;
  }
  std::vector<size_t> sizes;
  for (int i = 4; i < argc; ++i) {
    sizes.push_back(std::max<size_t>(std::strtoull(argv[i], nullptr, 10), sizeof(float)));
  }
  if (sizes.empty()) {
    sizes = {4,        1 << 10,  16 << 10,  256 << 10, 1 << 20,
             16 << 20, 64 << 20, 102228128, 437928960};  // the last two: ResNet-50 and BERT-base
  }
  const size_t bytes = kPage + size * 2 * slot_bytes;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    return 1;
  }
  std::memset(memory, 0, bytes);
  int rank = size - 1;
  while (rank > 0 && fork() != 0) --rank;
  if (rank != 0) prctl(PR_SET_PDEATHSIG, SIGKILL);  // never outlive a first process that failed
  Process process(static_cast<char*>(memory), rank, size, slot_bytes / sizeof(float), streaming);
  if (!run(process, rank, size, sizes)) return 1;
  while (rank == 0 && wait(nullptr) > 0) {
  }
  return 0;
}
