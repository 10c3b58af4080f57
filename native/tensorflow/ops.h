// The operators that TensorFlow gets to know. Must not know how a call travels.
#pragma once

#include <string>

namespace horovod::tensorflow {

// Registers all operators and kernels; what went wrong, or nothing.
std::string register_ops();

}  // namespace horovod::tensorflow
