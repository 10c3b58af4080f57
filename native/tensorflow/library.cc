// What the outside sees of this library: it registers when TensorFlow loads it, and Python tells it
// where the engine is. Must not know any operator.

#include <cstdint>
#include <string>

#include "api.h"
#include "flight.h"
#include "ops.h"
#include "xla.h"

namespace {

std::string& problem() {
  static std::string text;
  return text;
}

// Runs inside tf.load_op_library(), which then finds the operators. It can't report, so Python asks
// horovod_tensorflow_problem().
__attribute__((constructor)) void load() {
  const std::string missing = horovod::tensorflow::load_api();
  problem() =
      missing.empty() ? horovod::tensorflow::register_ops() : "this TensorFlow lacks " + missing;
}

}  // namespace

#define HOROVOD_EXPORT extern "C" __attribute__((visibility("default")))

HOROVOD_EXPORT const char* horovod_tensorflow_problem() { return problem().c_str(); }

HOROVOD_EXPORT void horovod_tensorflow_bind(uint64_t door) {
  horovod::tensorflow::set_door(reinterpret_cast<horovod::Door*>(door));
}

// Why functions that XLA compiles can't have collectives, or nothing. They can from then on.
HOROVOD_EXPORT const char* horovod_tensorflow_register_with_xla() {
  return horovod::tensorflow::register_handler().c_str();
}
