// L5: an engine: calls and their handles, one driver at a time, sleeping and waking. Must not know
// Python, how peers were found, or what a pass does.
//
// Whoever waits does the work: a caller blocked in wait() drives the passes itself, so that no
// other thread has to be woken for its result. When no caller waits the engine thread does, asleep
// unless something happens. The driver holds driver_; everything in Progress, the transport and the
// schedules belongs to it. mutex_ guards handles, names and the queue of new calls. A leaving
// driver hands over to another waiter, else to the engine thread, before it returns.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "call_map.h"
#include "progress.h"
#include "wait.h"

namespace horovod {

struct EngineOptions {
  ProgressOptions progress;
  Descriptor doorbell;                      // the eventfd that peers ring
  std::vector<Descriptor> peer_bells;       // kept open for the transport, which borrows them
  std::vector<Descriptor> sockets, pidfds;  // by rank
};

class Engine {
 public:
  // Throws Error(Resource) if a thread or descriptor is refused.
  explicit Engine(EngineOptions options);
  // Must not run in a forked child: leak the object there.
  ~Engine();
  Engine(const Engine&) = delete;

  // Any thread, never blocks, never drives. Throws Error(InvalidArgument) if the call is wrong by
  // itself (the others are told, unless the name is in flight here already or this rank is no
  // member) and Error(Shutdown) and others once the engine is dead. The memory of the tensors must
  // stay until the handle is done. A call with `when_done` counts as waited for from the start, and
  // its handle is unknown to the functions below.
  int64_t submit(std::shared_ptr<LocalCall> call, uint32_t site = 0);
  // The number of a place in the program, "train.py:12", to submit calls with. Kept for good, so
  // there are at most kMostSites; 0, an unknown place, for any more.
  static constexpr size_t kMostSites = 4096;
  uint32_t add_site(std::string text);
  // The adapter refused its user's call: members that wait for the name get an error instead.
  void reject(Reject reject);

  // Throw Error(InvalidArgument) for an unknown handle.
  bool poll(int64_t handle);
  bool wait(int64_t handle, Duration timeout);      // whether it is done; drives
  std::shared_ptr<LocalCall> take(int64_t handle);  // of a done handle, which is forgotten

  // Whether this thread runs a `when_done` of this engine's, in which wait() would never return.
  bool in_callback() const {
    return in_callback_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }

  // Without a reason: in good order, after everything that was agreed has run. With one: at once,
  // and every peer's calls fail with it. Afterwards nothing but take(), poll() and wait() works.
  // Idempotent.
  void shutdown(const std::string& reason, Duration timeout);

  // In a forked child: closes all descriptors and makes every later call fail. Takes no lock, joins
  // nothing.
  void abandon();
  bool abandoned() const { return abandoned_.load(); }

  std::optional<Status> failure();
  std::vector<std::string> pending();
  std::map<uint32_t, std::vector<int32_t>> process_sets();
  std::map<std::string, uint64_t> counters();
  int message_fd() const { return message_event_.get(); }  // readable when there are log lines
  std::vector<LogLine> take_messages();
  void add_message(LogLine line);  // an adapter's own

 private:
  using Event = std::variant<LocalCallPtr, Reject>;

  const LocalCallPtr& find_locked(int64_t handle) const;
  void say_blocked_locked(const LocalCallPtr& call);
  void check_not_forked() const;
  void check_alive_locked();
  const std::vector<int32_t>& members_locked(uint32_t set, OpKind kind) const;
  void push_locked(Event event, uint64_t bytes, bool urgent);
  void wake_soon();
  [[noreturn]] void throw_prefixed(const LocalCall& call, const Status& status) const;

  // The driver's.
  bool pass();
  void take_events();
  template <typename Work>
  void guarded(Work&& work);
  void deliver();
  bool linger();  // whether something came before the driver lost its patience
  bool quiet();   // whether the driver may sleep; then it has said that it does
  void awake();
  void collect(std::chrono::nanoseconds timeout);
  template <typename Done>
  void drive(Done&& done, TimePoint until);
  void leave(std::unique_lock<std::mutex> driver);
  void mute_idle(bool muted);
  void hand_over();
  std::chrono::nanoseconds until(TimePoint at) const;

  void run();  // the engine thread
  std::chrono::nanoseconds serve();
  void end_epoch(const std::string& reason, TimePoint deadline);

  const int32_t rank_, size_;
  Descriptor doorbell_;
  std::vector<Descriptor> peer_bells_;
  Descriptor message_event_;
  Waiter waiter_;
  std::unique_ptr<Progress> progress_;  // until shutdown() has ended

  std::mutex driver_;
  TimePoint now_{};                  // driver's: when its last pass began
  bool moved_ = false;               // driver's: whether its last pass did anything
  Waiter::Ended ended_;              // driver's
  bool failure_reported_ = false;    // driver's
  bool alone_ = false;               // driver's: nobody else wanted its core when it last yielded
  std::vector<Event> taken_events_;  // scratch of take_events(), as the next
  std::vector<LocalCallPtr> taken_blocked_;
  std::vector<LocalCallPtr> completed_;  // scratch of deliver()
  std::atomic<bool> muted_{false};       // written with mutex_ held
  std::atomic<bool> asleep_{false};      // the doorbell is needed to reach the driver
  std::atomic<uint64_t> queued_{0};      // events_ that wait for the driver
  std::atomic<int64_t> wakes_at_{0};     // when the timer rings, ns of TimePoint
  std::atomic<int64_t> idle_until_{0};   // when the engine thread wakes by itself, ns of TimePoint

  std::mutex mutex_;
  std::condition_variable waiters_cv_;
  size_t waiters_ = 0;  // callers asleep in wait() that don't drive
  uint64_t queued_bytes_ = 0;
  std::vector<Event> events_;
  std::vector<LocalCallPtr> newly_blocked_;
  std::unordered_map<int64_t, LocalCallPtr> handles_;
  CallMap<LocalCallPtr> names_;  // in flight; they own the names that they are found by
  std::map<uint32_t, std::vector<int32_t>> sets_;
  std::map<std::string, uint32_t> site_numbers_;
  std::vector<const std::string*> sites_;  // by number less one
  std::optional<Status> failure_;
  std::vector<LogLine> messages_;
  Progress::Counters counters_;
  Coordinator::Counters coordinator_counters_;
  int64_t next_handle_ = 1;
  bool shut_down_ = false;

  std::atomic<bool> abandoned_{false};
  std::atomic<bool> closing_{false};            // shutdown() drives, nobody else
  std::atomic<std::thread::id> in_callback_{};  // the driver while it runs a `when_done`
  std::mutex shutdown_;                         // one at a time
  std::thread thread_;
};

}  // namespace horovod
