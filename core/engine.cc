// L5: the engine. Must not know Python, or what a pass does.

#include "engine.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "describe.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace horovod {
namespace {

using Clock = std::chrono::steady_clock;

// How long a driver that finds nothing to do looks again before it sleeps: about what it costs to
// fall asleep and be woken, where a core that has nothing to run is halted. Whoever has work gets
// the core meanwhile. Measured on 2 hardware threads, 4 B through horovod.torch: 2 processes, while
// every look was a yield, 100 us after 10 us of them, 64 us after 60, 74 and 61 us after 150 and
// 400; 4 processes, as it is, 151 us after 20 us, 132 us after 100, 122 us after 1 ms.
constexpr auto kPatience = std::chrono::microseconds(100);
// A yield that takes less than kSwitch found nobody who wanted the core; the next one, which is a
// system call, can wait for kSpin.
constexpr auto kSwitch = std::chrono::microseconds(1);
constexpr auto kSpin = std::chrono::microseconds(5);
constexpr auto kSlice = std::chrono::milliseconds(100);  // then a driver hands over
// Submitted bytes that wake a sleeping driver, or the time after the first of them. A caller mostly
// waits at once, and then drives: a thread that its call wakes takes 15 to 40 us of a core from the
// two (256 KiB, 2 processes: 61 -> 45 us without it), which pays for long transfers only.
constexpr uint64_t kUrgentBytes = 4 << 20;
constexpr auto kLazyWake = std::chrono::microseconds(500);
constexpr int kLastLooks = 4;  // passes that a leaving driver does for late arrivals

// The arithmetic of a pass must not depend on what its caller set (flush-to-zero, rounding).
class DefaultFloatingPoint {
 public:
#if defined(__x86_64__)
  DefaultFloatingPoint() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatingPoint() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultFloatingPoint() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~DefaultFloatingPoint() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

// Leaves the core's other hardware thread more of it for a moment.
void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

int64_t ns(TimePoint t) { return t.time_since_epoch().count(); }

TimePoint saturating(TimePoint now, Duration timeout) {
  return timeout > Duration::max() / 4 ? TimePoint::max() : now + timeout;
}

[[noreturn]] void too_many(const std::string& what, size_t are, size_t most) {
  throw Error(ErrorKind::InvalidArgument,
              what + ": " + std::to_string(are) + ", at most " + std::to_string(most));
}

// What the wire can't carry.
void check_limits(const LocalCall& call) {
  if (call.tensors.size() > kMaxTensors) {
    too_many("too many tensors in one call", call.tensors.size(), kMaxTensors);
  }
  for (const Tensor& t : call.tensors) {
    if (t.shape.size() > kMaxDims) too_many("too many dimensions", t.shape.size(), kMaxDims);
  }
}

uint64_t payload(const LocalCall& call) {
  uint64_t bytes = 0;
  for (const Tensor& t : call.tensors) bytes += count_of(t.shape) * info(t.dtype).size;
  return bytes;
}

// What the members must agree on, of a call whose kind, set, name and flags are there.
void complete_request(LocalCall& call) {
  Request& r = call.request;
  const OpInfo& op = info(call.kind);
  r.kind = call.kind;
  if (op.reduces) {
    r.op = call.op;
    r.prescale = call.prescale;
    r.postscale = call.postscale;
  }
  if (op.rooted) r.root = call.root;
  for (const Tensor& t : call.tensors) {
    const auto first = t.shape.begin() + (op.own_rows ? 1 : 0);
    r.tensors.push_back({t.dtype, Shape(first, t.shape.end())});
  }
}

}  // namespace

Engine::Engine(EngineOptions options)
    : rank_(options.progress.rank),
      size_(static_cast<int32_t>(options.progress.names.size())),
      doorbell_(std::move(options.doorbell)),
      peer_bells_(std::move(options.peer_bells)),
      message_event_(make_event()),
      waiter_(doorbell_.get(), std::move(options.sockets), std::move(options.pidfds)),
      progress_(std::make_unique<Progress>(std::move(options.progress))) {
  sets_ = progress_->sets();
  try {
    thread_ = std::thread(&Engine::run, this);
  } catch (const std::system_error& e) {
    throw Error(ErrorKind::Resource, std::string("no thread for the engine: ") + e.what());
  }
}

Engine::~Engine() { shutdown("its engine was destroyed", Duration{}); }

// ---- Calls ------------------------------------------------------------------------------------

uint32_t Engine::add_site(std::string text) {
  if (abandoned()) return 0;
  std::lock_guard lock(mutex_);
  if (const auto known = site_numbers_.find(text); known != site_numbers_.end()) {
    return known->second;
  }
  if (sites_.size() == kMostSites) return 0;
  const auto number = static_cast<uint32_t>(sites_.size() + 1);
  sites_.push_back(&site_numbers_.emplace(std::move(text), number).first->first);
  return number;
}

int64_t Engine::submit(LocalCallPtr call, uint32_t site) {
  check_not_forked();
  std::unique_lock lock(mutex_);
  check_alive_locked();
  Request& request = call->request;
  if (request.name.size() > kMaxName) {  // so that the others can't even be told
    too_many(std::string(info(call->kind).name) + ": the name is too long in bytes",
             request.name.size(), kMaxName);
  }
  const auto& members = members_locked(request.set, call->kind);
  if (names_.contains({request.set, request.name})) {
    throw_prefixed(*call,
                   {ErrorKind::InvalidArgument,
                    "the name is in flight: wait for the earlier call, or give another", -1});
  }
  try {
    check_limits(*call);
    check_arguments(*call, members);
  } catch (const Error& e) {
    push_locked(Reject{call->kind, request.set, request.name, e.status().text}, 0, true);
    throw_prefixed(*call, e.status());
  }
  complete_request(*call);
  if (site > 0 && site <= sites_.size()) call->site = sites_[site - 1];
  names_.add({request.set, request.name}, call);
  const int64_t handle = next_handle_++;
  call->blocked = call->waited = static_cast<bool>(call->when_done);
  if (!call->waited) handles_.emplace(handle, call);
  const uint64_t bytes = payload(*call);
  const bool urgent = call->waited;
  push_locked(std::move(call), bytes, urgent);
  return handle;
}

void Engine::reject(Reject reject) {
  if (abandoned()) return;
  std::lock_guard lock(mutex_);
  if (failure_ || shut_down_ || closing_ || reject.name.size() > kMaxName ||
      names_.contains({reject.set, reject.name})) {
    return;
  }
  push_locked(std::move(reject), 0, true);
}

void Engine::check_alive_locked() {
  if (failure_) throw Error(*failure_);
  if (shut_down_ || closing_) {
    throw Error(ErrorKind::Shutdown, "the engine was shut down; call init() again");
  }
}

const std::vector<int32_t>& Engine::members_locked(uint32_t set, OpKind kind) const {
  const auto it = sets_.find(set);
  const std::string op(info(kind).name);
  if (it == sets_.end()) {
    throw Error(ErrorKind::InvalidArgument,
                op + ": there is no process set " + std::to_string(set) + " (was it removed?)");
  }
  if (!std::binary_search(it->second.begin(), it->second.end(), rank_)) {
    throw Error(ErrorKind::InvalidArgument, op + ": rank " + std::to_string(rank_) +
                                                " is no member of process set " +
                                                std::to_string(set));
  }
  return it->second;
}

void Engine::throw_prefixed(const LocalCall& call, const Status& status) const {
  throw Error(status.kind,
              message_prefix(rank_, size_) + describe_call(call.kind, call.request.name) + ": " +
                  status.text,
              status.rank);
}

// Wakes a sleeping driver at once if someone waits or much is queued, else soon: so that the hooks
// of a backward pass don't pay for a wake-up each.
void Engine::push_locked(Event event, uint64_t bytes, bool urgent) {
  events_.push_back(std::move(event));
  queued_bytes_ += bytes;
  queued_.fetch_add(1, std::memory_order_seq_cst);
  if (!asleep_.load(std::memory_order_seq_cst)) return;  // it looks before it sleeps
  if (urgent || queued_bytes_ >= kUrgentBytes) {
    progress_->transport().ring_self();
  } else {
    wake_soon();
  }
}

// Wakes the engine thread kLazyWake from now at the latest. Costs a system call once per kLazyWake.
void Engine::wake_soon() {
  const int64_t now = ns(Clock::now());
  int64_t at = wakes_at_.load(std::memory_order_relaxed);
  if (at > now) return;
  if (!wakes_at_.compare_exchange_strong(at, now + Duration(kLazyWake).count())) return;
  waiter_.arm_timer(kLazyWake);
}

const LocalCallPtr& Engine::find_locked(int64_t handle) const {
  const auto it = handles_.find(handle);
  if (it == handles_.end()) {
    throw Error(ErrorKind::InvalidArgument, "no handle " + std::to_string(handle));
  }
  return it->second;
}

void Engine::check_not_forked() const {
  if (abandoned()) throw Error(ErrorKind::Shutdown, "this process was forked: it has no engine");
}

bool Engine::poll(int64_t handle) {
  check_not_forked();
  std::lock_guard lock(mutex_);
  return find_locked(handle)->done.load(std::memory_order_acquire);
}

LocalCallPtr Engine::take(int64_t handle) {
  check_not_forked();
  std::lock_guard lock(mutex_);
  LocalCallPtr call = find_locked(handle);
  if (!call->done.load(std::memory_order_acquire)) {
    throw Error(ErrorKind::InvalidArgument,
                "handle " + std::to_string(handle) + " isn't done: wait for it first");
  }
  handles_.erase(handle);
  return call;
}

// The call is urgent from now on: its announcement says so, or another message if that has gone.
void Engine::say_blocked_locked(const LocalCallPtr& call) {
  if (std::exchange(call->waited, true)) return;
  if (call->taken) {
    newly_blocked_.push_back(call);
    queued_.fetch_add(1, std::memory_order_seq_cst);
  } else {
    call->blocked = true;
  }
}

bool Engine::wait(int64_t handle, Duration timeout) {
  check_not_forked();
  LocalCallPtr call;
  const auto done = [&] { return call->done.load(std::memory_order_acquire); };
  {
    std::lock_guard lock(mutex_);
    call = find_locked(handle);
    if (done()) return true;
    say_blocked_locked(call);
  }
  TimePoint now = Clock::now();
  const TimePoint deadline = saturating(now, timeout);
  bool slept = false;
  for (; !done(); now = Clock::now()) {
    if (now >= deadline) break;
    const TimePoint until = std::min(deadline, now + kSlice);
    std::unique_lock driver(driver_, std::try_to_lock);
    if (!driver.owns_lock() || closing_) {
      if (driver.owns_lock()) driver.unlock();
      std::unique_lock lock(mutex_);
      ++waiters_;
      // With mutex_ held, whoever drives now will see waiters_ when it leaves.
      if (!closing_) driver = std::unique_lock(driver_, std::try_to_lock);
      if (!driver.owns_lock() && !done()) {
        // A driver that sleeps doesn't know yet that this call is urgent.
        if (asleep_.load(std::memory_order_seq_cst) && !shut_down_) {
          progress_->transport().ring_self();
        }
        waiters_cv_.wait_until(lock, until);
        slept = true;
      }
      --waiters_;
    }
    if (driver.owns_lock()) {
      drive([&] { return done() || closing_; }, until);
      leave(std::move(driver));
    }
  }
  if (slept) hand_over();  // it may have been this caller whom the last driver chose to follow it
  return done();
}

// ---- Driving ----------------------------------------------------------------------------------

bool Engine::pass() {
  const DefaultFloatingPoint fp;
  now_ = Clock::now();
  const bool had_events = queued_.load(std::memory_order_acquire) > 0;
  if (had_events) take_events();
  for (const int32_t rank : std::exchange(ended_, {})) progress_->peer_closed(rank);
  moved_ = had_events;
  guarded([&] { moved_ = progress_->pass(now_) || moved_; });
  deliver();
  return moved_;
}

// Nothing half done can be taken back: an exception ends the epoch, and with it every call.
template <typename Work>
void Engine::guarded(Work&& work) {
  try {
    work();
  } catch (const std::exception& error) {
    progress_->fail_because_of(error);
  }
}

void Engine::take_events() {
  {
    std::lock_guard lock(mutex_);
    taken_events_.swap(events_);
    taken_blocked_.swap(newly_blocked_);
    for (const Event& event : taken_events_) {
      if (const auto* call = std::get_if<LocalCallPtr>(&event)) (*call)->taken = true;
    }
    queued_.store(0, std::memory_order_seq_cst);
    queued_bytes_ = 0;
  }
  for (Event& event : taken_events_) {
    guarded([&] {
      if (auto* call = std::get_if<LocalCallPtr>(&event)) {
        progress_->submit(std::move(*call), now_);
      } else {
        progress_->reject(std::get<Reject>(std::move(event)), now_);
      }
    });
  }
  for (const LocalCallPtr& call : taken_blocked_) guarded([&] { progress_->blocked(*call, now_); });
  taken_events_.clear();
  taken_blocked_.clear();
}

void Engine::deliver() {
  progress_->take_completed(completed_);
  std::vector<LogLine> log = progress_->take_log();
  const bool failed = progress_->failure().has_value();
  if (completed_.empty() && log.empty() && (!failed || failure_reported_)) return;
  std::unique_lock lock(mutex_);
  counters_ = progress_->counters();
  coordinator_counters_ = progress_->coordinator_counters();
  for (const LocalCallPtr& call : completed_) {
    names_.take({call->request.set, call->request.name});
    if (call->status.ok() && (call->kind == OpKind::AddSet || call->kind == OpKind::RemoveSet)) {
      sets_ = progress_->sets();
    }
    call->done.store(true, std::memory_order_release);
  }
  if (failed && !failure_reported_) {
    failure_reported_ = true;
    if (!failure_) failure_ = progress_->failure();
    log.push_back({10, failure_->text});  // so that whoever watches messages learns of it
  }
  if (!log.empty()) {
    messages_.insert(messages_.end(), std::make_move_iterator(log.begin()),
                     std::make_move_iterator(log.end()));
    signal_event(message_event_.get());
  }
  if (waiters_ > 0) waiters_cv_.notify_all();
  lock.unlock();
  in_callback_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  for (const LocalCallPtr& call : completed_) {
    // Whoever is told may hold what owns the call: it lets go here, where nothing is locked.
    if (const auto when_done = std::move(call->when_done)) when_done(*call);
  }
  in_callback_.store({}, std::memory_order_relaxed);
  completed_.clear();
}

bool Engine::quiet() {
  // What the last pass did may let the next one do more, and it hears of ends.
  if (moved_ || !ended_.empty()) return false;
  asleep_.store(true, std::memory_order_seq_cst);
  progress_->transport().sleep(true);
  if (queued_.load(std::memory_order_seq_cst) == 0 && progress_->idle() &&
      Clock::now() < progress_->next_deadline()) {
    return true;
  }
  awake();
  return false;
}

void Engine::awake() {
  asleep_.store(false, std::memory_order_seq_cst);
  progress_->transport().sleep(false);
}

void Engine::collect(std::chrono::nanoseconds timeout) { waiter_.sleep(timeout, ended_); }

std::chrono::nanoseconds Engine::until(TimePoint at) const {
  if (at == TimePoint::max()) return std::chrono::nanoseconds(-1);
  return std::max(std::chrono::nanoseconds(0), std::chrono::nanoseconds(at - Clock::now()));
}

// Stays awake for kPatience at most. Whoever it waits for may need the core: while anybody does, it
// yields between all looks.
bool Engine::linger() {
  TimePoint now = now_;
  TimePoint yields_at = alone_ ? now + kSpin : now;
  while (now - now_ < kPatience) {
    if (now < yields_at) {
      relax();
      now = Clock::now();
    } else {
      const TimePoint before = std::exchange(now, (::sched_yield(), Clock::now()));
      alone_ = now - before < kSwitch;
      if (alone_) yields_at = now + kSpin;
    }
    if (queued_.load(std::memory_order_acquire) > 0 || !progress_->idle()) return true;
  }
  return false;
}

// Lingers and then sleeps.
template <typename Done>
void Engine::drive(Done&& done, TimePoint until_time) {
  awake();
  while (!done()) {
    const bool moved = pass();
    if (now_ >= until_time) return;
    if (moved || linger()) continue;
    mute_idle(true);
    if (quiet()) {
      collect(until(std::min(until_time, progress_->next_deadline())));
      awake();
    }
  }
}

// From here on the doorbell reaches the engine thread, or another waiter if there is one.
void Engine::leave(std::unique_lock<std::mutex> driver) {
  // The engine thread was woken in vain and muted itself: take what woke it, or it would be again.
  if (muted_.load(std::memory_order_relaxed)) collect(std::chrono::nanoseconds(0));
  bool kick = false;
  if (progress_->at_rest()) {
    // No call of this rank is open, so no peer waits for it. A script that makes one blocking call
    // after another comes back soon: peers need not ring and wake the engine thread between the
    // calls.
    asleep_.store(true, std::memory_order_seq_cst);
    kick = queued_.load(std::memory_order_seq_cst) > 0;
    wake_soon();
  } else {
    for (int looks = 0; !quiet() && !kick; ++looks) {
      kick = looks == kLastLooks;  // more arrives than a caller who has its result should deal with
      if (!kick) pass();
    }
  }
  kick = kick || ns(progress_->next_deadline()) < idle_until_.load(std::memory_order_relaxed);
  if (kick) waiter_.kick();  // before shutdown() can close the waiter
  driver.unlock();
  mute_idle(false);
  hand_over();
}

void Engine::mute_idle(bool muted) {
  std::lock_guard lock(mutex_);
  if (shut_down_ || muted_ == muted) return;
  muted_ = muted;
  waiter_.mute_idle(muted);
}

void Engine::hand_over() {
  std::lock_guard lock(mutex_);
  if (waiters_ > 0 && !closing_) waiters_cv_.notify_one();
}

void Engine::run() {
  sigset_t all;
  ::sigfillset(&all);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) ::sigdelset(&all, fault);
  ::pthread_sigmask(SIG_SETMASK, &all, nullptr);  // signals are for the program's own threads
  while (!closing_) {
    std::unique_lock driver(driver_, std::try_to_lock);
    if (!driver.owns_lock()) {
      mute_idle(true);
      // A driver that leaves from here on unmutes; one that left before did not.
      if (!driver.try_lock()) {
        waiter_.sleep_idle(kSlice);  // the driver minds the deadlines
        continue;
      }
      mute_idle(false);
    }
    const auto timeout = serve();
    driver.unlock();
    hand_over();
    waiter_.sleep_idle(timeout);
  }
}

// Passes until there is nothing to do; how long that will last if nothing happens.
std::chrono::nanoseconds Engine::serve() {
  awake();
  do {
    collect(std::chrono::nanoseconds(0));
    while (pass() && !closing_) {
    }
  } while (!closing_ && !quiet());
  const TimePoint deadline = progress_->next_deadline();
  idle_until_.store(ns(deadline), std::memory_order_relaxed);
  return until(deadline);
}

// ---- Ends -------------------------------------------------------------------------------------

void Engine::shutdown(const std::string& reason, Duration timeout) {
  if (abandoned()) return;
  std::lock_guard once(shutdown_);
  if (shut_down_) return;
  const TimePoint deadline = saturating(Clock::now(), timeout);
  closing_ = true;
  progress_->transport().ring_self();
  waiter_.kick();
  thread_.join();
  {
    const std::lock_guard driver(driver_);  // a waiter that drives sees closing_ and leaves
    end_epoch(reason, deadline);
  }
  // Nobody drives from here on; what is kept is what take() gives away.
  std::lock_guard lock(mutex_);
  shut_down_ = true;
  progress_.reset();
  waiter_.close();
  doorbell_.close();
  peer_bells_.clear();
  waiters_cv_.notify_all();
}

void Engine::end_epoch(const std::string& reason, TimePoint deadline) {
  const std::string who = "rank " + std::to_string(rank_);
  Status why;
  now_ = Clock::now();
  take_events();  // the last ones: no call may stay behind without an end
  if (!reason.empty()) {
    why = {ErrorKind::PeerLost, who + " exited: " + reason, rank_};
  } else if (!progress_->failure()) {
    guarded([&] { progress_->leave(now_); });
    drive(
        [this] {
          return progress_->failure() || (progress_->drained() && progress_->others_left());
        },
        deadline);
    if (!progress_->failure() && !progress_->drained()) {
      why = {ErrorKind::PeerLost, who + " shut down in the middle of an operation", rank_};
    }
  }
  if (!progress_->failure()) {
    if (why.ok()) {
      progress_->goodbye(why);
      why = {ErrorKind::Shutdown, "the engine was shut down; call init() again", rank_};
      progress_->fail(std::move(why), /*tell=*/false);
    } else {
      progress_->fail(std::move(why));
    }
  }
  // A ring of control bytes that stays full belongs to a peer that doesn't read: it will see the
  // end of the connection.
  const TimePoint patience = Clock::now() + std::chrono::milliseconds(200);
  while (!progress_->flush() && Clock::now() < patience) ::sched_yield();
  deliver();
}

void Engine::abandon() {
  abandoned_ = true;
  waiter_.close();
  doorbell_.close();
  message_event_.close();
  for (Descriptor& bell : peer_bells_) bell.close();
}

// ---- Looking in -------------------------------------------------------------------------------

std::optional<Status> Engine::failure() {
  if (abandoned()) return Status{ErrorKind::Shutdown, "this process was forked", -1};
  std::lock_guard lock(mutex_);
  return failure_;
}

std::vector<std::string> Engine::pending() {
  std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  names_.for_each([&](const CallKey& key, const LocalCallPtr&) { names.emplace_back(key.name); });
  std::sort(names.begin(), names.end());
  return names;
}

std::map<uint32_t, std::vector<int32_t>> Engine::process_sets() {
  if (abandoned()) return {};
  std::lock_guard lock(mutex_);
  return sets_;
}

std::map<std::string, uint64_t> Engine::counters() {
  std::lock_guard lock(mutex_);
  return {{"entries", counters_.entries},
          {"inline_entries", counters_.inline_entries},
          {"calls", counters_.calls},
          {"fused_calls", counters_.fused_calls},
          {"passes", counters_.passes},
          {"coordinator_entries", coordinator_counters_.entries},
          {"coordinator_tensors", coordinator_counters_.tensors},
          {"coordinator_fused_tensors", coordinator_counters_.fused_tensors},
          {"coordinator_cached_announcements", coordinator_counters_.cached_announcements},
          {"coordinator_errors", coordinator_counters_.errors}};
}

void Engine::add_message(LogLine line) {
  if (abandoned()) return;
  std::lock_guard lock(mutex_);
  messages_.push_back(std::move(line));
  signal_event(message_event_.get());
}

std::vector<LogLine> Engine::take_messages() {
  std::lock_guard lock(mutex_);
  clear_event(message_event_.get());
  return std::move(messages_);
}

}  // namespace horovod
