// L3: the executor of schedules. Must not know entries, names or agreement.

#include "mesh.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace horovod {
namespace {

constexpr size_t kWindow = 64;  // steps of a run that one pass looks at

// What it takes to run `work`, for StoreChoice.
template <typename Work>
uint64_t ns_of(Work&& work) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  work();
  const std::chrono::nanoseconds took = Clock::now() - start;
  return static_cast<uint64_t>(took.count());
}

// A slot that was written with `stores` may be published from now on.
void finish(Stores stores) {
  if (stores == Stores::Streaming) store_fence();
}

bool sends(const Step& step) { return step.kind == StepKind::Send || step.forward; }

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
  bool moved = false, send_waits = false;
  for (size_t i = run.first; i < end && !closed_; ++i) {
    if (run.done[i]) continue;
    const Step& step = run.schedule.steps[i];
    const bool in_turn = !send_waits || !sends(step);
    if (in_turn && try_step(run, step, oldest)) {
      run.done[i] = moved = true;
    } else {
      close_channels(run, step);
      send_waits = send_waits || sends(step);
    }
  }
  while (run.first < count && run.done[run.first]) ++run.first;
  closed_ = closed_ || end < count;
  return moved;
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
  const auto copy = [&] {
    run.in.for_each(step.in, step.bytes,
                    [&](std::byte* from, uint64_t offset, uint64_t bytes, DType) {
                      kernels_.copy_to_slot(slot + offset, stores, from, bytes);
                    });
    finish(stores);
  };
  if (stores_.measures(step.bytes)) {
    stores_.wrote(step.bytes, ns_of(copy));
  } else {
    copy();
    stores_.wrote_unmeasured();
  }
  transport_.publish(stores);
  return true;
}

bool Mesh::store(const Run& run, const Step& step) {
  const int32_t from = ranks_of(run, step).front();
  if (receives_closed_[from]) return false;
  const Arrival slot = transport_.peek(from, step.bytes);
  if (slot.data == nullptr) return false;
  const auto copy = [&] {
    run.out.for_each(step.out, step.bytes,
                     [&](std::byte* to, uint64_t offset, uint64_t bytes, DType) {
                       std::memcpy(to, slot.data + offset, bytes);
                     });
  };
  if (stores_.measures(step.bytes)) {
    stores_.read(slot.stores, step.bytes, ns_of(copy));
  } else {
    copy();
  }
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
  Stores theirs = Stores::Ordinary;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const Arrival slot = transport_.peek(ranks[i], step.bytes);
    if (slot.data == nullptr) return false;
    slots_[static_cast<size_t>(peers[i])] = slot.data;
    theirs = slot.stores;  // ranks are in step, by and large: one speaks for all
  }
  std::byte* forward = nullptr;
  if (step.forward && !ranks.empty()) {
    forward = transport_.reserve(ranks, step.bytes, oldest);
    if (forward == nullptr) return false;
  }
  if (!ranks.empty() && forward == nullptr && stores_.measures(step.bytes)) {
    stores_.read(theirs, step.bytes, ns_of([&] { fold_slots(run, step, nullptr); }));
  } else {
    fold_slots(run, step, forward);
  }
  if (forward != nullptr) transport_.publish(stores_.next());
  for (const int32_t rank : ranks) transport_.consume(rank);
  return true;
}

void Mesh::fold_slots(const Run& run, const Step& step, std::byte* forward) {
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
  if (forward != nullptr) finish(stores);
}

void Mesh::close_channels(const Run& run, const Step& step) {
  const bool receives = step.kind == StepKind::Store || step.kind == StepKind::Fold;
  for (const int32_t rank : ranks_of(run, step)) {
    if (sends(step)) sends_closed_[rank] = 1;
    if (receives) receives_closed_[rank] = 1;
  }
}

std::span<const int32_t> Mesh::ranks_of(const Run& run, const Step& step) {
  ranks_.clear();
  for (const int32_t peer : run.schedule.peers_of(step)) ranks_.push_back(run.group[peer]);
  return ranks_;
}

}  // namespace horovod
