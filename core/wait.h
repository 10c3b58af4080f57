// L1: what an engine sleeps on: doorbell, timer, connections and processes of peers, behind one
// epoll. Must not know what any of them means, nor who drives.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace horovod {

// A descriptor that is closed with its owner.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      close();
      fd_ = other.release();
    }
    return *this;
  }
  ~Descriptor() { close(); }

  int get() const { return fd_; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void close();

 private:
  int fd_ = -1;
};

// All of these throw Error(Resource) naming what was refused, and make descriptors that are closed
// on exec.
Descriptor duplicate(int fd);
Descriptor make_event();  // an eventfd
void signal_event(int fd);
void clear_event(int fd);

// Two sleepers share the sources: the driver and, when nobody drives, the engine thread. While a
// driver sleeps it mutes the other, so that an event wakes one thread and the right one.
class Waiter {
 public:
  // `doorbell` is borrowed; sockets and pidfds by rank, -1 where there is none, are taken over.
  Waiter(int doorbell, std::vector<Descriptor> sockets, std::vector<Descriptor> pidfds);

  // What woke a sleeper: the ranks whose connection or process has ended, once each.
  using Ended = std::vector<int32_t>;

  // The driver's sleep. Returns at `timeout` at the latest (rounded up to 1 ms; negative: never)
  // with what has ended; consumes rings and the timer.
  void sleep(std::chrono::nanoseconds timeout, Ended& ended);

  // The engine thread's sleep: until there is something for a driver to collect with sleep(0), or a
  // kick.
  void sleep_idle(std::chrono::nanoseconds timeout);
  void kick();

  void mute_idle(bool muted);

  // Rings once, `after` from now; may be called by any thread.
  void arm_timer(std::chrono::nanoseconds after);

  // Closes everything; nothing may sleep here any more, or it is a forked child.
  void close();

 private:
  void watch(int epoll, int fd, uint64_t tag);
  bool socket_ended(int fd);

  int doorbell_;
  std::vector<Descriptor> sockets_, pidfds_;
  Descriptor events_, idle_, kick_, timer_;
};

}  // namespace horovod
