// L5: how native code outside this library, an adapter's kernels, reaches the engine that runs now.
// Must not know who knocks. Nothing here throws: an exception would have to cross libraries.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine.h"

namespace horovod {

// What adapters see. They get its address from Python once; engines come and go behind it.
class Door {
 public:
  // Hands the call to the engine and returns; `when_done` must be set, and runs unless the status
  // is an error. `site` is the place in the program that made the call, or empty.
  virtual Status submit(LocalCallPtr call, const std::string& site) noexcept = 0;
  // Hands the call over and drives the engine until it is done; what became of it. An error inside
  // a `when_done`, whose thread drives already.
  virtual Status run(LocalCallPtr call, const std::string& site) noexcept = 0;
  // Lets the members that make the matching call fail too: this rank's can't be made.
  virtual void reject(Reject reject) noexcept = 0;

  // Has the user told, through the log.
  virtual void warn(const std::string& text) noexcept = 0;

  struct World {
    int32_t rank = -1, size = 0, local_rank = -1, local_size = 0;  // as here if none is open
  };
  virtual World world() noexcept = 0;
  // The global ranks in the process set, ascending; empty if there is no such set.
  virtual std::vector<int32_t> members(uint32_t set) noexcept = 0;

 protected:
  ~Door() = default;
};

// The door of a process; closed until an engine is put behind it.
class Doorway final : public Door {
 public:
  void open(std::shared_ptr<Engine> engine, World world);
  void close();  // what is under way goes on, with the engine's own end

  Status submit(LocalCallPtr call, const std::string& site) noexcept override;
  Status run(LocalCallPtr call, const std::string& site) noexcept override;
  void reject(Reject reject) noexcept override;
  void warn(const std::string& text) noexcept override;
  World world() noexcept override;
  std::vector<int32_t> members(uint32_t set) noexcept override;

 private:
  std::shared_ptr<Engine> engine();

  std::mutex mutex_;
  std::shared_ptr<Engine> engine_;
  World world_;
};

}  // namespace horovod
