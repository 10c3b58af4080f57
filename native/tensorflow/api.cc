// Finds TensorFlow's C API. Must not know any operator.

#include "api.h"

#include <dlfcn.h>

namespace horovod::tensorflow {

Api tf;

std::string load_api() {
  // Loaded already: this library is opened by TensorFlow's own loader of operators.
  void* library = ::dlopen("libtensorflow_framework.so.2", RTLD_NOW | RTLD_NOLOAD);
  std::string missing;
  const auto find = [&](const char* name) {
    void* symbol = library == nullptr ? nullptr : ::dlsym(library, name);
    if (symbol == nullptr) symbol = ::dlsym(RTLD_DEFAULT, name);
    if (symbol == nullptr) missing += std::string(missing.empty() ? "" : ", ") + name;
    return symbol;
  };
#define HOROVOD_TF_FIND(result, name, arguments) \
  tf.name = reinterpret_cast<result(*) arguments>(find(#name));
  HOROVOD_TF_API(HOROVOD_TF_FIND)
#undef HOROVOD_TF_FIND
  return missing;
}

}  // namespace horovod::tensorflow
