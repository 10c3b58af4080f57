// L3: a collective as plain data, for one rank. Must not know sockets, slots, threads or tensors.
//
// A schedule speaks of two virtual vectors, this rank's input and its output: the concatenation of
// views, each padded to kAlignment. Positions are bytes in them. Peers are numbered by their place
// in the group that runs the schedule.
//
// The executor may run steps out of order as long as (a) this rank's sends keep their order,
// whoever they are for, and for each peer its receives keep theirs, and (b) a step comes after the
// step that it names in `after`. So a schedule is right if, for every pair, the sends of one side
// and the receives of the other match in number, order and size, and if the dependencies leave some
// step ready at every moment: tests/core checks both by stepping all ranks in a loop.
//
// Room for slots is short, hence two more rules. All ranks list their steps in one order of stages,
// and a slot is received in a later stage than it is sent. And what a rank has sent up to a stage
// and others receive in that stage or later fits four of the largest slots, wherever they lie, or
// its receivers need nothing but the slot. mesh.h says why that is enough.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace horovod {

enum class StepKind : uint8_t {
  Send,   // `bytes` of the input at `in`, to every peer of `peers`
  Store,  // `bytes` from the one peer of `peers` into the output at `out`
  Fold,   // own `bytes` of the input at `in` and one slot from every peer of `peers`, folded in the
         // order of ranks into the output at `out`; if `forward`, the result is also sent to all of
         // `peers`
  Copy,  // `bytes` of the input at `in` into the output at `out`
};

struct Step {
  StepKind kind = StepKind::Copy;
  bool forward = false;
  uint64_t in = 0;
  uint64_t out = 0;
  uint64_t bytes = 0;
  uint32_t first_peer = 0, peers = 0;  // a range of Schedule::peers
  int32_t after = -1;                  // index of an earlier step

  bool sends() const { return kind == StepKind::Send || forward; }
  bool operator==(const Step&) const = default;
};

struct Schedule {
  std::vector<Step> steps;
  std::vector<int32_t> peers;

  std::span<const int32_t> peers_of(const Step& step) const {
    return {peers.data() + step.first_peer, step.peers};
  }
  uint64_t bytes_sent() const {
    uint64_t bytes = 0;
    for (const Step& step : steps) bytes += step.sends() ? step.bytes : 0;
    return bytes;
  }
};

}  // namespace horovod
