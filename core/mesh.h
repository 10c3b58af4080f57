// L3: advances schedules over a transport, on lists of views. Must not know entries, names or
// agreement.
#pragma once

#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels.h"
#include "schedule.h"
#include "stores.h"
#include "transport.h"
#include "types.h"

namespace horovod {

// The virtual vector of schedule.h: views, each padded to kAlignment. Nothing is packed; a
// schedule's positions are looked up here.
class VirtualVector {
 public:
  VirtualVector() = default;
  explicit VirtualVector(std::vector<View> views);

  // Calls piece(data, offset, bytes, dtype) for every stretch of user memory in [begin, begin +
  // bytes); `offset` counts from `begin`.
  template <typename Piece>
  void for_each(uint64_t begin, uint64_t bytes, Piece&& piece) const {
    const uint64_t end = begin + bytes;
    for (size_t i = find(begin); i < views_.size() && starts_[i] < end; ++i) {
      const uint64_t from = begin > starts_[i] ? begin - starts_[i] : 0;
      const uint64_t to = std::min(views_[i].bytes, end - starts_[i]);
      if (from < to) {
        piece(views_[i].data + from, starts_[i] + from - begin, to - from, views_[i].dtype);
      }
    }
  }

  // The user memory at a position that lies in a view.
  std::byte* at(uint64_t position) const {
    const size_t i = find(position);
    return views_[i].data + (position - starts_[i]);
  }

 private:
  size_t find(uint64_t position) const;  // the view whose padded range holds the position

  std::vector<View> views_;
  std::vector<uint64_t> starts_{0};  // one more than views
};

// A schedule on its way.
struct Run {
  Schedule schedule;
  VirtualVector in, out;
  std::vector<int32_t> group;  // global ranks, in the order of the schedule's peers
  FoldSpec fold;               // the dtype comes from each view
  std::vector<bool> done = {};
  size_t first = 0;  // the first step that isn't done
  // Its time tells which stores are better: this rank is the first of the group, and writes much.
  bool timed = false;
  std::chrono::steady_clock::time_point since = {};  // what has been counted ends here

  bool finished() const { return first == schedule.steps.size(); }
};

// Why no run waits for ever: of all entries take the oldest that some rank hasn't finished. It is
// that rank's oldest too, as there is one global order; so it has the room of the oldest for
// itself, as all slots of earlier entries are consumed. Look at the rank whose first unfinished
// step is of the earliest stage (see schedule.h). What this step receives was sent in an earlier
// one. And what fills the room was sent before it, as sends keep their order, and not received yet,
// so it is of few stages and leaves room for one slot more.
//
// That is why no send may overtake one that found no room, not even to another reader. Room is
// freed at any moment, also between two tries of one pass: slots that overtake could take all of
// it, while their readers' folds wait for ranks whose own sends were overtaken.
class Mesh {
 public:
  Mesh(Transport& transport, const Kernels& kernels, size_t ranks,
       StoreChoice stores = StoreChoice());

  // A pass advances the runs in flight, oldest first: begin_pass(), then advance() each once. The
  // sends of a run keep their order. Runs of one pass share the order of each pair's slots: a step
  // waits while an older run still has one to do on that channel.
  void begin_pass();
  bool advance(Run& run, bool oldest);  // whether any step was done
  void close() { closed_ = true; }      // the rest of the pass does nothing
  const Kernels& kernels() const { return kernels_; }
  StoreChoice& stores() { return stores_; }

 private:
  bool try_step(Run& run, const Step& step, bool oldest);
  bool send(const Run& run, const Step& step, bool oldest);
  bool store(const Run& run, const Step& step);
  bool fold(const Run& run, const Step& step, bool oldest);
  void publish(const Step& step, Stores stores);
  const std::byte* peek(const Run& run, const Step& step, int32_t from);
  void take_time(Run& run);
  void close_channels(const Run& run, const Step& step);
  std::span<const int32_t> ranks_of(const Run& run, const Step& step);

  Transport& transport_;
  const Kernels& kernels_;
  StoreChoice stores_;
  uint64_t wrote_bytes_ = 0;  // since the oldest run last did a step
  bool closed_ = false;       // an older run has steps that this pass doesn't reach
  std::vector<uint8_t> sends_closed_, receives_closed_;  // by global rank
  std::vector<int32_t> ranks_;                           // scratch of ranks_of
  std::vector<const std::byte*> slots_, terms_;          // scratch of fold
};

}  // namespace horovod
