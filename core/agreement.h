// L4: whether the ranks of one call asked for the same thing. Must not know readiness or order.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "types.h"
#include "wire.h"

namespace horovod {

// What one rank asked for under the name in question.
struct Vote {
  int32_t rank = 0;
  const Request* request = nullptr;
};

// Ok, or the first disagreement in the documented order: dtype, operation, number of tensors,
// shape, scale factors, reduce op, joined ranks, 0-d tensors, dimensions after the first, root.
// `votes`: one or more, by ascending rank. `joined`: the ranks that joined instead of voting, if
// this call can't do without them.
Status disagreement(std::span<const Vote> votes, std::span<const int32_t> joined);

}  // namespace horovod
