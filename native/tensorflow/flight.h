// One collective on its way: from a kernel's inputs to its outputs. Must not know how operators are
// registered.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "api.h"
#include "core/door.h"

namespace horovod::tensorflow {

// What a node of a graph, or an eager call, fixes.
struct Node {
  const char* type = "";  // the operator's name, which error messages start with
  OpKind kind = OpKind::Allreduce;
  std::string name;  // of the call, without the number of a loop's iteration
  std::string site;  // the user's line
  uint32_t set = 0;
  ReduceOp op = ReduceOp::Sum;
  int32_t root = -1;
  double prescale = 1.0, postscale = 1.0;
  bool wait = false;  // the calling thread waits, and drives the engine
};

using Done = std::function<void()>;

// The way to the engine; null until Python has said where it is.
Door* door();
void set_door(Door* door);

// Runs the node's collective on the inputs of `context`. Returns at once and calls `done` later, on
// another thread, unless the node waits: then `done` is called before it returns. Failures are
// reported to the context.
void fly(std::shared_ptr<const Node> node, TF_OpKernelContext* context, Done done);

}  // namespace horovod::tensorflow
