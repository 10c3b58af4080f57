// Collectives in functions that TensorFlow compiles with XLA. Must not know how one is run.
#pragma once

#include <string>

namespace horovod::tensorflow {

// Tells the XLA of this process's TensorFlow of the handler `horovod_collective`, once; why it
// can't be, or nothing.
const std::string& register_handler();

}  // namespace horovod::tensorflow
