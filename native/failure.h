// What became of a call, as frameworks built on absl report it. Must not know any of them.
#pragma once

#include <string>
#include <utility>

#include "core/types.h"

namespace horovod {

// Those of absl's codes, which TensorFlow and XLA share, that collectives fail with.
enum Code : int {
  kOk = 0,
  kUnknown = 2,
  kInvalidArgument = 3,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
};

class Failure {
 public:
  Failure() = default;
  Failure(int code, std::string text) : code_(code), text_(std::move(text)) {}
  explicit operator bool() const { return code_ != kOk; }
  int code() const { return code_; }
  const std::string& text() const { return text_; }

 private:
  int code_ = kOk;
  std::string text_;
};

// A call that was refused for want of an engine says so as "not initialized" does; one that an
// engine's end took with it failed like the engine.
inline Failure failure_of(const Status& status, bool submitted) {
  switch (status.kind) {
    case ErrorKind::None:
      return {};
    case ErrorKind::InvalidArgument:
      return {submitted ? kAborted : kInvalidArgument, status.text};
    case ErrorKind::Mismatch:
      return {kFailedPrecondition, status.text};
    case ErrorKind::Shutdown:
      return {submitted ? kUnknown : kFailedPrecondition, status.text};
    default:
      return {kUnknown, status.text};
  }
}

}  // namespace horovod
