// Who uses a name of a call now. Must not know what a call does.

#include "turns.h"

namespace horovod {

Turn Turns::take(const Key& key, Successor* successor, int64_t step) {
  const std::lock_guard lock(mutex_);
  auto& queue = turns_[key];
  for (const Waiting& other : queue) {
    if (step != kNoStep && other.step == step) return Turn::Twice;
  }
  queue.push_back({successor, step});
  return queue.size() == 1 ? Turn::Now : Turn::Later;
}

Successor* Turns::pass_on(const Key& key) {
  const std::lock_guard lock(mutex_);
  const auto it = turns_.find(key);
  it->second.pop_front();
  if (!it->second.empty()) return it->second.front().successor;
  turns_.erase(it);
  return nullptr;
}

Turns& turns() {
  static Turns* const all = new Turns;  // never destroyed: threads may use it while a process ends
  return *all;
}

BlockingTurn::BlockingTurn(Turns::Key key) : key_(std::move(key)) {
  if (turns().take(key_, this, Turns::kNoStep) == Turn::Now) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return mine_; });  // as long as the call before this one takes
}

BlockingTurn::~BlockingTurn() {
  if (Successor* next = turns().pass_on(key_)) next->give_turn();
}

void BlockingTurn::give_turn() {
  const std::lock_guard lock(mutex_);
  mine_ = true;
  changed_.notify_one();
}

}  // namespace horovod
