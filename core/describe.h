// L4: ranks, calls and values in the words of messages to people. Must not know why a message is
// written. Texts stay short whatever their input: long lists end in a count, long names in "...".
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "types.h"

namespace horovod {

// Adapters name calls "allreduce.conv1.weight": the name without the kind in front of it.
std::string_view bare_name(OpKind kind, std::string_view name);

std::string describe_call(OpKind kind, std::string_view name);  // allreduce "conv1.weight"
std::string describe_ranks(std::span<const int32_t> ranks);     // ranks 0-2, 5; rank 3
std::string describe_number(double value);                      // the shortest exact form
std::string describe_seconds(double seconds);                   // 61 s, 0.25 s

// What every message of an engine starts with: "[horovod 3/8] ".
std::string message_prefix(int32_t rank, int32_t size);

// "rank 1 (host, pid 123)"; `names` by rank.
std::string describe_rank(int32_t rank, std::span<const std::string> names);

// The first `limit` of `parts`, and how many more there are.
std::string join_some(std::span<const std::string> parts, size_t limit, std::string_view separator);

}  // namespace horovod
