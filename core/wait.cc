// L1: sleeping. Must not know engines.

#include "wait.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "types.h"

namespace horovod {
namespace {

// An epoll tag: what kind of source it is, and the rank it belongs to.
enum class Source : uint64_t { Doorbell, Timer, Socket, Process, Kick, Events };
constexpr uint64_t tag(Source source, uint64_t rank = 0) {
  return static_cast<uint64_t>(source) << 32 | rank;
}

int checked(int result, const char* what) {
  if (result < 0) {
    throw Error(ErrorKind::Resource, std::string(what) + " failed: " + std::strerror(errno));
  }
  return result;
}

int timeout_ms(std::chrono::nanoseconds timeout) {
  if (timeout.count() < 0) return -1;
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(timeout).count();
  return static_cast<int>(std::min<int64_t>(ms, 1 << 30));
}

void drain(int fd) {  // eventfds and timerfds are read as one number
  uint64_t count;
  [[maybe_unused]] const ssize_t n =
      ::read(fd, &count, sizeof count);  // EAGAIN: another thread was first
}

}  // namespace

void Descriptor::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Descriptor duplicate(int fd) {
  if (fd < 0) return {};
  return Descriptor(checked(::fcntl(fd, F_DUPFD_CLOEXEC, 0), "duplicating a descriptor"));
}

Descriptor make_event() {
  return Descriptor(checked(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "making an eventfd"));
}

void signal_event(int fd) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n =
      ::write(fd, &one, sizeof one);  // fails only if it is set already
}

void clear_event(int fd) { drain(fd); }

Waiter::Waiter(int doorbell, std::vector<Descriptor> sockets, std::vector<Descriptor> pidfds)
    : doorbell_(doorbell),
      sockets_(std::move(sockets)),
      pidfds_(std::move(pidfds)),
      events_(checked(::epoll_create1(EPOLL_CLOEXEC), "making an epoll")),
      idle_(checked(::epoll_create1(EPOLL_CLOEXEC), "making an epoll")),
      kick_(make_event()),
      timer_(checked(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK),
                     "making a timer")) {
  watch(events_.get(), doorbell_, tag(Source::Doorbell));
  watch(events_.get(), timer_.get(), tag(Source::Timer));
  for (size_t r = 0; r < sockets_.size(); ++r) {
    if (sockets_[r].get() >= 0) watch(events_.get(), sockets_[r].get(), tag(Source::Socket, r));
  }
  for (size_t r = 0; r < pidfds_.size(); ++r) {
    if (pidfds_[r].get() >= 0) watch(events_.get(), pidfds_[r].get(), tag(Source::Process, r));
  }
  watch(idle_.get(), kick_.get(), tag(Source::Kick));
  watch(idle_.get(), events_.get(), tag(Source::Events));
}

void Waiter::watch(int epoll, int fd, uint64_t tag) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = tag;
  checked(::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event), "watching a descriptor");
}

void Waiter::sleep(std::chrono::nanoseconds timeout, Ended& ended) {
  std::array<epoll_event, 64> events;
  const int n = ::epoll_wait(events_.get(), events.data(), events.size(), timeout_ms(timeout));
  for (int i = 0; i < n; ++i) {  // n < 0 is EINTR: a wake-up like any other
    const auto rank = static_cast<uint32_t>(events[static_cast<size_t>(i)].data.u64);
    switch (static_cast<Source>(events[static_cast<size_t>(i)].data.u64 >> 32)) {
      case Source::Doorbell:
        drain(doorbell_);
        break;
      case Source::Timer:
        drain(timer_.get());
        break;
      case Source::Socket:
        if (!socket_ended(sockets_[rank].get())) break;
        ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, sockets_[rank].get(), nullptr);
        ended.push_back(static_cast<int32_t>(rank));
        break;
      case Source::Process:
        ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, pidfds_[rank].get(), nullptr);
        ended.push_back(static_cast<int32_t>(rank));
        break;
      default:
        break;
    }
  }
}

// Nothing is ever sent on these connections after they were proved: what can be read is their end.
bool Waiter::socket_ended(int fd) {
  std::array<char, 256> bytes;
  const ssize_t n = ::recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

void Waiter::sleep_idle(std::chrono::nanoseconds timeout) {
  epoll_event event{};
  const int n = ::epoll_wait(idle_.get(), &event, 1, timeout_ms(timeout));
  if (n == 1 && event.data.u64 == tag(Source::Kick)) drain(kick_.get());
}

void Waiter::kick() { signal_event(kick_.get()); }

void Waiter::mute_idle(bool muted) {
  epoll_event event{};
  event.events = muted ? 0u : static_cast<uint32_t>(EPOLLIN);
  event.data.u64 = tag(Source::Events);
  checked(::epoll_ctl(idle_.get(), EPOLL_CTL_MOD, events_.get(), &event), "muting a descriptor");
}

void Waiter::arm_timer(std::chrono::nanoseconds after) {
  itimerspec spec{};
  spec.it_value.tv_sec = after.count() / 1'000'000'000;
  spec.it_value.tv_nsec = after.count() % 1'000'000'000;
  checked(::timerfd_settime(timer_.get(), 0, &spec, nullptr), "arming a timer");
}

void Waiter::close() {
  for (Descriptor& d : sockets_) d.close();
  for (Descriptor& d : pidfds_) d.close();
  for (Descriptor* d : {&events_, &idle_, &kick_, &timer_}) d->close();
}

}  // namespace horovod
