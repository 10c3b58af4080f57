// L2: shared-memory outboxes. Must not know schedules, entries or the clock.
//
// Segment of rank w, for n ranks:
//
//   Header       sleep, beats: a cache line each
//   Consumed[n]  written by w, the reader: how many of rank y's slots and control bytes w has read
//   Channel[n]   written by w, the writer, one per reader: a ring of slot records, a ring of
//                control bytes
//   slots        outbox_bytes, on a 4 KiB boundary
//
// Every position is 64-bit, grows only, and has one writer and a cache line of its own. To publish
// is to store a slot record's sequence number: the reader polls exactly that line, so a slot costs
// it one cache miss before its data.
//
// Sleeping needs no fence of its own: who publishes or consumes stores its position and then loads
// `sleep`, the sleeper stores `sleep` and then loads all positions, all four sequentially
// consistent, so one of the two sees the other. Peers only ever take `sleep` down, to kAwake, and
// whoever does so rings: were there a flag that a reader clears before it looks for a sleeper, it
// could clear what the writer has asked for in between.

#include "shm.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <string>

#include "kernels.h"

namespace horovod {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kRecords = 64;             // slots in flight per pair
constexpr uint64_t kControlBytes = 32 << 10;  // control bytes in flight per pair

struct alignas(kAlignment) Word {
  std::atomic<uint64_t> value;
};

enum Sleep : uint64_t {
  kAwake,
  kAsleep,       // ring when something is published
  kAsleepNoRoom  // and when something is consumed: a reserve() or write_control() failed
};

struct Header {
  Word sleep;
  Word beats;
};

struct Consumed {
  Word slots;
  Word control;
};

struct alignas(kAlignment) SlotRecord {
  std::atomic<uint64_t> sequence;  // 1 + number of the slot on this pair
  uint64_t offset;
  uint64_t bytes;
  Stores stores;  // what it was written with
};

struct Channel {
  SlotRecord records[kRecords];
  Word control_written;
  alignas(kAlignment) std::byte control[kControlBytes];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);

constexpr uint64_t page_up(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

constexpr uint64_t slots_at(size_t ranks) {
  return page_up(sizeof(Header) + ranks * (sizeof(Consumed) + sizeof(Channel)));
}

// One rank's segment; memory that is all zero is a valid start.
class Segment {
 public:
  Segment(Mapping mapping, size_t ranks) : mapping_(std::move(mapping)), ranks_(ranks) {}
  Header& header() const { return *reinterpret_cast<Header*>(mapping_.get()); }
  Consumed& consumed(int32_t of) const {
    return reinterpret_cast<Consumed*>(mapping_.get() + sizeof(Header))[of];
  }
  Channel& channel(int32_t to) const {
    return reinterpret_cast<Channel*>(mapping_.get() + sizeof(Header) +
                                      ranks_ * sizeof(Consumed))[to];
  }
  std::byte* slots() const { return mapping_.get() + slots_at(ranks_); }

 private:
  Mapping mapping_;
  size_t ranks_;
};

// A part of the outbox that is written and freed in order, as a ring.
class Arena {
 public:
  Arena(uint64_t base, uint64_t bytes) : base_(base), bytes_(bytes) {}

  struct Target {
    int32_t reader;
    uint64_t count;  // the slot is free for this reader once it has consumed so many
  };

  bool has_room(uint64_t bytes) const { return place(bytes) + bytes - tail_ <= bytes_; }
  // Where in the outbox the slot lies. It is in flight from now on; say to whom with add_target().
  uint64_t reserve(uint64_t bytes) {
    const uint64_t begin = place(bytes);
    head_ = begin + bytes;
    slots_.push_back({head_, 0});
    return base_ + begin % bytes_;
  }
  void add_target(Target target) {
    targets_.push_back(target);
    ++slots_.back().targets;
  }
  // `consumed_by(reader)` is the number of this rank's slots that a reader has consumed.
  template <typename Consumed>
  void reclaim(Consumed&& consumed_by) {
    while (!slots_.empty()) {
      const Slot& slot = slots_.front();
      for (size_t i = 0; i < slot.targets; ++i) {
        if (consumed_by(targets_[i].reader) < targets_[i].count) return;
      }
      targets_.erase(targets_.begin(), targets_.begin() + static_cast<ptrdiff_t>(slot.targets));
      tail_ = slot.end;
      slots_.pop_front();
    }
    head_ = tail_ = 0;
  }

 private:
  struct Slot {
    uint64_t end;  // a position: it grows, its offset is taken modulo bytes_
    size_t targets;
  };

  // A slot never wraps: one that would starts over at offset 0.
  uint64_t place(uint64_t bytes) const {
    const uint64_t offset = head_ % bytes_;
    return offset + bytes <= bytes_ ? head_ : head_ + (bytes_ - offset);
  }

  const uint64_t base_, bytes_;
  uint64_t head_ = 0, tail_ = 0;
  std::deque<Slot> slots_;
  std::deque<Target> targets_;  // of the slots in flight, in the same order
};

class Shm final : public Transport {
 public:
  explicit Shm(ShmOptions options)
      : rank_(options.rank),
        outbox_bytes_(options.outbox_bytes),
        doorbells_(std::move(options.doorbells)),
        peers_(options.segments.size()),
        arenas_{Arena(0, outbox_bytes_ / 2), Arena(outbox_bytes_ / 2, outbox_bytes_ / 2)} {
    for (auto& mapping : options.segments) {
      segments_.emplace_back(std::move(mapping), peers_.size());
    }
  }

  // Four slots fit an arena. An allreduce has the chunks of two segments and their results on the
  // way at once, and slots that don't wrap waste some room: with two it could wait for itself.
  uint64_t max_slot_bytes() const override { return outbox_bytes_ / 8 / kAlignment * kAlignment; }

  std::byte* reserve(std::span<const int32_t> to, uint64_t bytes, bool oldest) override {
    Arena& arena = arenas_[oldest ? kOldest : kYounger];
    if (!has_room(arena, to, bytes, oldest)) {
      ask_for_room();
      // A reader may have consumed before it could see that room is wanted.
      if (!has_room(arena, to, bytes, oldest)) return nullptr;
    }
    reserved_ = {&arena, arena.reserve(bytes), bytes};
    reserved_to_.assign(to.begin(), to.end());
    return own().slots() + reserved_.offset;
  }

  void publish(Stores stores) override {
    for (const int32_t reader : reserved_to_) {
      const uint64_t number = peers_[reader].sent++;
      SlotRecord& d = own().channel(reader).records[number % kRecords];
      d.offset = reserved_.offset;
      d.bytes = reserved_.bytes;
      d.stores = stores;
      d.sequence.store(number + 1, std::memory_order_seq_cst);
      reserved_.arena->add_target({reader, number + 1});
      ring_if(kAsleep, reader);
    }
  }

  Arrival peek(int32_t from, uint64_t bytes) override {
    const uint64_t number = peers_[from].received;
    const SlotRecord& d = segments_[from].channel(rank_).records[number % kRecords];
    if (d.sequence.load(std::memory_order_acquire) != number + 1) return {};
    if (d.bytes != bytes || d.offset > outbox_bytes_ || d.bytes > outbox_bytes_ - d.offset) {
      throw Error(ErrorKind::InvalidArgument,
                  "a slot of " + std::to_string(d.bytes) + " bytes arrived where " +
                      std::to_string(bytes) + " were due: the two ranks run different schedules",
                  from);
    }
    return {segments_[from].slots() + d.offset, d.stores};
  }

  void consume(int32_t from) override {
    own().consumed(from).slots.value.store(++peers_[from].received, std::memory_order_seq_cst);
    ring_if(kAsleepNoRoom, from);
  }

  size_t write_control(int32_t to, std::span<const std::byte> bytes) override {
    size_t room = control_room(to);
    if (room < bytes.size()) {
      ask_for_room();
      room = control_room(to);
    }
    const size_t n = std::min(room, bytes.size());
    if (n == 0) return 0;
    Channel& channel = own().channel(to);
    const uint64_t at = peers_[to].control_sent % kControlBytes;
    const size_t first = std::min<size_t>(n, kControlBytes - at);
    std::memcpy(channel.control + at, bytes.data(), first);
    std::memcpy(channel.control, bytes.data() + first, n - first);
    peers_[to].control_sent += n;
    channel.control_written.value.store(peers_[to].control_sent, std::memory_order_seq_cst);
    ring_if(kAsleep, to);
    return n;
  }

  std::span<const std::byte> read_control(int32_t from) override {
    const Channel& channel = segments_[from].channel(rank_);
    const uint64_t written = channel.control_written.value.load(std::memory_order_acquire);
    const uint64_t read = peers_[from].control_received;
    if (written - read > kControlBytes) {
      throw Error(ErrorKind::InvalidArgument, "an impossible control position", from);
    }
    const uint64_t at = read % kControlBytes;
    return {channel.control + at, std::min(written - read, kControlBytes - at)};
  }

  void consume_control(int32_t from, size_t bytes) override {
    peers_[from].control_received += bytes;
    own().consumed(from).control.value.store(peers_[from].control_received,
                                             std::memory_order_seq_cst);
    ring_if(kAsleepNoRoom, from);
  }

  void sleep(bool asleep) override {
    const Sleep state = !asleep ? kAwake : waits_for_room_ ? kAsleepNoRoom : kAsleep;
    own().header().sleep.value.store(state, std::memory_order_seq_cst);
  }

  bool idle() override {
    for (int32_t y = 0; y < size(); ++y) {
      if (y == rank_) continue;
      const Channel& channel = segments_[y].channel(rank_);
      const uint64_t number = peers_[y].received;
      if (peers_[y].seen != number + 1 && channel.records[number % kRecords].sequence.load(
                                              std::memory_order_seq_cst) == number + 1) {
        peers_[y].seen = number + 1;  // one that no running entry wants yet must not keep us awake
        return false;
      }
      if (channel.control_written.value.load(std::memory_order_seq_cst) !=
          peers_[y].control_received) {
        return false;
      }
    }
    if (waits_for_room_ && reader_positions() != positions_at_failure_) {
      waits_for_room_ = false;
      return false;
    }
    return true;
  }

  void ring_self() override { ring(rank_); }

  void beat() override { own().header().beats.value.fetch_add(1, std::memory_order_relaxed); }
  uint64_t beats_of(int32_t rank) override {
    return segments_[rank].header().beats.value.load(std::memory_order_relaxed);
  }

 private:
  struct Peer {
    uint64_t sent = 0, received = 0;                  // slots
    uint64_t control_sent = 0, control_received = 0;  // bytes
    uint64_t seen = 0;  // 1 + number of the arrived slot that idle() has reported
  };
  struct Reserved {
    Arena* arena = nullptr;
    uint64_t offset = 0, bytes = 0;
  };

  int32_t size() const { return static_cast<int32_t>(segments_.size()); }
  Segment& own() { return segments_[rank_]; }

  uint64_t consumed_by(int32_t reader) {
    return segments_[reader].consumed(rank_).slots.value.load(std::memory_order_seq_cst);
  }

  bool has_room(Arena& arena, std::span<const int32_t> to, uint64_t bytes, bool oldest) {
    arena.reclaim([this](int32_t reader) { return consumed_by(reader); });
    if (!arena.has_room(bytes)) return false;
    const uint64_t depth = oldest ? kRecords : kRecords / 2;
    for (const int32_t reader : to) {
      if (peers_[reader].sent - consumed_by(reader) >= depth) return false;
    }
    return true;
  }

  size_t control_room(int32_t to) {
    const uint64_t read =
        segments_[to].consumed(rank_).control.value.load(std::memory_order_seq_cst);
    return kControlBytes - (peers_[to].control_sent - read);
  }

  // From here on idle() reports what is freed. Not from a later failure on: room may come between
  // two of them that the first could use.
  void ask_for_room() {
    if (waits_for_room_) return;
    waits_for_room_ = true;
    positions_at_failure_ = reader_positions();
  }

  uint64_t reader_positions() {  // changes whenever some reader frees room
    uint64_t sum = 0;
    for (int32_t y = 0; y < size(); ++y) {
      if (y == rank_) continue;
      sum += consumed_by(y);
      sum += segments_[y].consumed(rank_).control.value.load(std::memory_order_seq_cst);
    }
    return sum;
  }

  void ring(int32_t rank) {
    const uint64_t one = 1;
    // The only failure of an eventfd write is a full counter, and then the reader is awake or about
    // to be.
    [[maybe_unused]] const ssize_t n = ::write(doorbells_[rank], &one, sizeof one);
  }
  // One ring per sleep.
  void ring_if(Sleep at_least, int32_t rank) {
    auto& sleep = segments_[rank].header().sleep.value;
    if (sleep.load(std::memory_order_seq_cst) >= at_least &&
        sleep.exchange(kAwake, std::memory_order_seq_cst) != kAwake) {
      ring(rank);
    }
  }

  const int32_t rank_;
  const uint64_t outbox_bytes_;
  std::vector<Segment> segments_;
  std::vector<int> doorbells_;
  std::vector<Peer> peers_;
  // An arena is freed in order, so a slot that its reader isn't ready for holds back all behind it.
  // Hence the oldest entry never shares one with younger entries: with overlapping process sets a
  // younger entry's reader may itself wait for the oldest.
  enum : size_t { kOldest, kYounger };
  std::array<Arena, 2> arenas_;
  Reserved reserved_;
  std::vector<int32_t> reserved_to_;
  bool waits_for_room_ = false;
  uint64_t positions_at_failure_ = 0;
};

Mapping map(int fd, int flags, uint64_t bytes) {
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (at == MAP_FAILED) {
    throw Error(ErrorKind::Resource, "mapping a segment of " + std::to_string(bytes) +
                                         " bytes failed: " + std::strerror(errno));
  }
  ::madvise(at, bytes,
            MADV_DONTFORK);  // advice: a child that is refused it merely keeps the mapping
  return Mapping(static_cast<std::byte*>(at), [bytes](std::byte* p) { ::munmap(p, bytes); });
}

}  // namespace

uint64_t segment_bytes(size_t ranks, uint64_t outbox_bytes) {
  return slots_at(ranks) + page_up(outbox_bytes);
}

Mapping map_segment(int fd, uint64_t bytes) {
  struct stat status{};
  if (::fstat(fd, &status) != 0 || static_cast<uint64_t>(status.st_size) < bytes) {
    throw Error(ErrorKind::Resource, "a segment's file is smaller than the " +
                                         std::to_string(bytes) + " bytes it has to hold");
  }
  return map(fd, MAP_SHARED, bytes);
}

Mapping anonymous_segment(uint64_t bytes) { return map(-1, MAP_PRIVATE | MAP_ANONYMOUS, bytes); }

std::unique_ptr<Transport> make_shm(ShmOptions options) {
  return std::make_unique<Shm>(std::move(options));
}

}  // namespace horovod
