// Who uses a name of a call now. Frameworks may make a call again before its last run has ended,
// and from several threads: those take turns, in the order of their coming. Must not know what a
// call does.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace horovod {

// Whoever comes after another one.
class Successor {
 public:
  virtual void give_turn() = 0;  // once, by any thread

 protected:
  ~Successor() = default;
};

enum class Turn { Now, Later, Twice };

class Turns {
 public:
  using Key = std::pair<uint32_t, std::string>;  // process set, name
  static constexpr int64_t kNoStep = 0;

  // Later: the successor is told. Twice: the same step has a call of this name under way, so that
  // this one has no place in the order.
  Turn take(const Key& key, Successor* successor, int64_t step);
  // Who comes after the one that has the turn, if anybody; to be told without delay.
  Successor* pass_on(const Key& key);

 private:
  struct Waiting {
    Successor* successor;
    int64_t step;
  };
  std::mutex mutex_;
  std::map<Key, std::deque<Waiting>> turns_;  // the first of each has the turn
};

// Those of all calls that this library makes.
Turns& turns();

// A turn that the calling thread waits for, and keeps as long as this lives.
class BlockingTurn final : private Successor {
 public:
  explicit BlockingTurn(Turns::Key key);
  ~BlockingTurn();
  BlockingTurn(const BlockingTurn&) = delete;

 private:
  void give_turn() override;

  const Turns::Key key_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool mine_ = false;
};

}  // namespace horovod
