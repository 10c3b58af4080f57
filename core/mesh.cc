// L3: the executor of schedules. Must not know entries, names or agreement.

#include "mesh.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace horovod {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kWindow = 64;  // steps of a run that one pass looks at

}  // namespace

VirtualVector::VirtualVector(std::vector<View> views) : views_(std::move(views)) {
  starts_.reserve(views_.size() + 1);
  for (const View& view : views_) starts_.push_back(starts_.back() + align_up(view.bytes));
}

size_t VirtualVector::find(uint64_t position) const {
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), position);
  return static_cast<size_t>(after - starts_.begin()) - 1;
}

Mesh::Mesh(Transport& transport, const Kernels& kernels, size_t ranks, StoreChoice stores)
    : transport_(transport),
      kernels_(kernels),
      stores_(std::move(stores)),
      sends_closed_(ranks),
      receives_closed_(ranks) {}

void Mesh::begin_pass() {
  closed_ = false;
  std::fill(sends_closed_.begin(), sends_closed_.end(), 0);
  std::fill(receives_closed_.begin(), receives_closed_.end(), 0);
}

bool Mesh::advance(Run& run, bool oldest) {
  const size_t count = run.schedule.steps.size();
  run.done.resize(count);
  const size_t end = std::min(run.first + kWindow, count);
  if (oldest && run.timed && run.since == Clock::time_point{}) run.since = Clock::now();
  bool moved = false, send_waits = false;
  for (size_t i = run.first; i < end && !closed_; ++i) {
    if (run.done[i]) continue;
    const Step& step = run.schedule.steps[i];
    const bool in_turn = !send_waits || !step.sends();
    if (in_turn && try_step(run, step, oldest)) {
      run.done[i] = moved = true;
      if (oldest) take_time(run);
    } else {
      close_channels(run, step);
      send_waits = send_waits || step.sends();
    }
  }
  while (run.first < count && run.done[run.first]) ++run.first;
  closed_ = closed_ || end < count;
  return moved;
}

// While runs follow each other each counts from when it is the oldest, and with it what the younger
// ones have written meanwhile: so every moment and every byte counts once.
void Mesh::take_time(Run& run) {
  const uint64_t wrote = std::exchange(wrote_bytes_, 0);
  if (!run.timed) return;
  const Clock::time_point before = std::exchange(run.since, Clock::now());
  stores_.wrote(wrote, run.since - before);
}

bool Mesh::try_step(Run& run, const Step& step, bool oldest) {
  if (step.after >= 0 && !run.done[static_cast<size_t>(step.after)]) return false;
  switch (step.kind) {
    case StepKind::Send:
      return send(run, step, oldest);
    case StepKind::Store:
      return store(run, step);
    case StepKind::Fold:
      return fold(run, step, oldest);
    case StepKind::Copy:
      run.in.for_each(step.in, step.bytes,
                      [&](std::byte* from, uint64_t offset, uint64_t bytes, DType) {
                        std::byte* to = run.out.at(step.out + offset);
                        if (to != from) std::memcpy(to, from, bytes);
                      });
      return true;
  }
  return false;
}

bool Mesh::send(const Run& run, const Step& step, bool oldest) {
  const auto to = ranks_of(run, step);
  for (const int32_t rank : to) {
    if (sends_closed_[rank]) return false;
  }
  std::byte* slot = transport_.reserve(to, step.bytes, oldest);
  if (slot == nullptr) return false;
  const Stores stores = stores_.next();
  run.in.for_each(step.in, step.bytes,
                  [&](std::byte* from, uint64_t offset, uint64_t bytes, DType) {
                    kernels_.copy_to_slot(slot + offset, stores, from, bytes);
                  });
  publish(step, stores);
  return true;
}

void Mesh::publish(const Step& step, Stores stores) {
  if (stores == Stores::Streaming) store_fence();
  wrote_bytes_ += step.bytes;
  transport_.publish(stores);
}

// A slot of rank `from`; the first member of the group says what stores to use.
const std::byte* Mesh::peek(const Run& run, const Step& step, int32_t from) {
  const Arrival slot = transport_.peek(from, step.bytes);
  if (slot.data != nullptr && from == run.group.front()) stores_.follow(slot.stores);
  return slot.data;
}

bool Mesh::store(const Run& run, const Step& step) {
  const int32_t from = ranks_of(run, step).front();
  if (receives_closed_[from]) return false;
  const std::byte* slot = peek(run, step, from);
  if (slot == nullptr) return false;
  run.out.for_each(step.out, step.bytes,
                   [&](std::byte* to, uint64_t offset, uint64_t bytes, DType) {
                     std::memcpy(to, slot + offset, bytes);
                   });
  transport_.consume(from);
  return true;
}

bool Mesh::fold(const Run& run, const Step& step, bool oldest) {
  const auto ranks = ranks_of(run, step);
  const auto peers = run.schedule.peers_of(step);
  for (const int32_t rank : ranks) {
    if (receives_closed_[rank] || (step.forward && sends_closed_[rank])) return false;
  }
  // One term per member in rank order; own memory is filled in piece by piece.
  slots_.assign(run.group.size(), nullptr);
  for (size_t i = 0; i < ranks.size(); ++i) {
    const std::byte* slot = peek(run, step, ranks[i]);
    if (slot == nullptr) return false;
    slots_[static_cast<size_t>(peers[i])] = slot;
  }
  std::byte* forward = nullptr;
  if (step.forward && !ranks.empty()) {
    forward = transport_.reserve(ranks, step.bytes, oldest);
    if (forward == nullptr) return false;
  }
  FoldSpec spec = run.fold;
  const Stores stores = stores_.next();
  terms_.resize(slots_.size());
  run.in.for_each(step.in, step.bytes,
                  [&](std::byte* own, uint64_t offset, uint64_t bytes, DType dtype) {
                    for (size_t i = 0; i < terms_.size(); ++i) {
                      terms_[i] = slots_[i] == nullptr ? own : slots_[i] + offset;
                    }
                    spec.dtype = dtype;
                    kernels_.fold(spec, run.out.at(step.out + offset),
                                  forward == nullptr ? nullptr : forward + offset, stores,
                                  terms_.data(), terms_.size(), bytes / info(dtype).size);
                  });
  if (forward != nullptr) publish(step, stores);
  for (const int32_t rank : ranks) transport_.consume(rank);
  return true;
}

void Mesh::close_channels(const Run& run, const Step& step) {
  const bool receives = step.kind == StepKind::Store || step.kind == StepKind::Fold;
  for (const int32_t rank : ranks_of(run, step)) {
    if (step.sends()) sends_closed_[rank] = 1;
    if (receives) receives_closed_[rank] = 1;
  }
}

std::span<const int32_t> Mesh::ranks_of(const Run& run, const Step& step) {
  ranks_.clear();
  for (const int32_t peer : run.schedule.peers_of(step)) ranks_.push_back(run.group[peer]);
  return ranks_;
}

}  // namespace horovod
