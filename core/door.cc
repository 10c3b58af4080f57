// L5: the way from native adapters to the engine. Must not know who knocks.

#include "door.h"

#include <chrono>
#include <exception>
#include <new>
#include <utility>

namespace horovod {
namespace {

Status closed() {
  return {ErrorKind::Shutdown, "horovod is not initialized: call init() first", -1};
}

// What `work` throws, as a status.
template <typename Work>
Status status_of(Work&& work) noexcept {
  try {
    return work();
  } catch (const Error& error) {
    return error.status();
  } catch (const std::bad_alloc&) {
    return {ErrorKind::Resource, "no memory for a call", -1};
  } catch (const std::exception& error) {
    return {ErrorKind::Resource, error.what(), -1};
  }
}

uint32_t site_number(Engine& engine, const std::string& site) {
  return site.empty() ? 0 : engine.add_site(site);
}

}  // namespace

void Doorway::open(std::shared_ptr<Engine> engine, World world) {
  const std::lock_guard lock(mutex_);
  engine_ = std::move(engine);
  world_ = world;
}

void Doorway::close() {
  std::shared_ptr<Engine> last;  // it may be the last reference: let go of without the lock
  const std::lock_guard lock(mutex_);
  last = std::exchange(engine_, nullptr);
  world_ = {};
}

std::shared_ptr<Engine> Doorway::engine() {
  const std::lock_guard lock(mutex_);
  return engine_;
}

Status Doorway::submit(LocalCallPtr call, const std::string& site) noexcept {
  return status_of([&]() -> Status {
    const auto engine = this->engine();
    if (engine == nullptr) return closed();
    engine->submit(std::move(call), site_number(*engine, site));
    return {};
  });
}

Status Doorway::run(LocalCallPtr call, const std::string& site) noexcept {
  return status_of([&]() -> Status {
    const auto engine = this->engine();
    if (engine == nullptr) return closed();
    if (engine->in_callback()) {
      return {ErrorKind::Resource,
              "a call that blocks was made by the thread that just ended another one, and nobody "
              "else would carry it on: give the program's graphs threads of their own",
              -1};
    }
    const int64_t handle = engine->submit(std::move(call), site_number(*engine, site));
    while (!engine->wait(handle, std::chrono::hours(1))) {
    }
    return engine->take(handle)->status;
  });
}

void Doorway::reject(Reject reject) noexcept {
  status_of([&]() -> Status {
    if (const auto engine = this->engine()) engine->reject(std::move(reject));
    return {};
  });
}

void Doorway::warn(const std::string& text) noexcept {
  constexpr int kWarning = 30;  // of Python's logging
  status_of([&]() -> Status {
    if (const auto engine = this->engine()) engine->add_message({kWarning, text});
    return {};
  });
}

Door::World Doorway::world() noexcept {
  const std::lock_guard lock(mutex_);
  return world_;
}

std::vector<int32_t> Doorway::members(uint32_t set) noexcept {
  std::vector<int32_t> members;
  status_of([&]() -> Status {
    if (const auto engine = this->engine()) {
      auto sets = engine->process_sets();
      if (const auto it = sets.find(set); it != sets.end()) members = std::move(it->second);
    }
    return {};
  });
  return members;
}

}  // namespace horovod
