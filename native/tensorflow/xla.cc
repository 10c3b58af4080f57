// Collectives in functions that TensorFlow compiles with XLA. Must not know how one is run.

#include "xla.h"

#include <dlfcn.h>

#include "flight.h"
#include "native/xla_call.h"

namespace horovod::tensorflow {
namespace {

xla::Error* handle(xla::Frame* frame) { return xla::run_collective(frame, door()); }

std::string try_to_register() {
  constexpr const char* kLibrary = "libtensorflow_cc.so.2";
  constexpr const char* kGetter = "_ZN3xla3ffi12GetXlaFfiApiEv";  // xla::ffi::GetXlaFfiApi()
  // Loaded already, or there is no TensorFlow to compile anything.
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD);
  void* getter = library == nullptr ? nullptr : ::dlsym(library, kGetter);
  if (getter == nullptr) getter = ::dlsym(RTLD_DEFAULT, kGetter);
  if (getter == nullptr) {
    return "this TensorFlow does not show XLA's interface for handlers (" + std::string(kGetter) +
           " in " + kLibrary + ")";
  }
  const xla::Api* api = reinterpret_cast<const xla::Api* (*)()>(getter)();
  // What came before versions had a pointer at this place.
  const bool has_version =
      api->struct_size >= sizeof(xla::Api) && api->version.struct_size == sizeof(xla::Version);
  if (!has_version || api->version.major != xla::kMajor || api->version.minor < xla::kLeastMinor) {
    const std::string found =
        has_version ? std::to_string(api->version.major) + "." + std::to_string(api->version.minor)
                    : "an older one";
    return "it needs version " + std::to_string(xla::kMajor) + "." +
           std::to_string(xla::kLeastMinor) +
           " or newer of XLA's interface for handlers, and this TensorFlow has " + found;
  }
  xla::RegisterArguments arguments{sizeof arguments,
                                   nullptr,
                                   {"horovod_collective", sizeof "horovod_collective" - 1},
                                   {"Host", sizeof "Host" - 1},
                                   {nullptr, nullptr, nullptr, handle},
                                   0};
  // An error can't be read by means of what is declared here; XLA logs it.
  return api->register_handler(&arguments) == nullptr ? "" : "XLA refused the handler";
}

}  // namespace

const std::string& register_handler() {
  static const std::string* const problem = new std::string(try_to_register());
  return *problem;
}

}  // namespace horovod::tensorflow
