// L4: the wording of ranks, calls and values in messages to people.
#include "describe.h"

#include <charconv>

namespace horovod {
namespace {

constexpr size_t kLongestName = 400;  // bytes shown
constexpr size_t kMostRanges = 16;

}  // namespace

std::string_view bare_name(OpKind kind, std::string_view name) {
  const std::string_view op = info(kind).name;
  const bool prefixed =
      name.size() > op.size() + 1 && name.starts_with(op) && name[op.size()] == '.';
  return prefixed ? name.substr(op.size() + 1) : name;
}

std::string describe_call(OpKind kind, std::string_view name) {
  std::string out(info(kind).name);
  name = bare_name(kind, name);
  out += " \"";
  if (name.size() <= kLongestName) {
    out += name;
  } else {
    size_t end = kLongestName;  // not inside a UTF-8 character
    while (end > 0 && (static_cast<unsigned char>(name[end]) & 0xC0) == 0x80) --end;
    out.append(name.substr(0, end)).append("...");
  }
  return out += '"';
}

std::string describe_ranks(std::span<const int32_t> ranks) {
  std::vector<std::string> ranges;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    std::string range = std::to_string(ranks[i]);
    if (last > i) range.append("-").append(std::to_string(ranks[last]));
    ranges.push_back(std::move(range));
    i = last + 1;
  }
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  return out += join_some(ranges, kMostRanges, ", ");
}

std::string describe_number(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  return std::string(text, end);
}

std::string describe_seconds(double seconds) {
  char text[64];
  char* const last = text + sizeof text;
  const auto end = seconds < 10
                       ? std::to_chars(text, last, seconds, std::chars_format::general, 2).ptr
                       : std::to_chars(text, last, seconds, std::chars_format::fixed, 0).ptr;
  return std::string(text, end) + " s";
}

std::string message_prefix(int32_t rank, int32_t size) {
  std::string out = "[horovod ";
  return out.append(std::to_string(rank)).append("/").append(std::to_string(size)).append("] ");
}

std::string describe_rank(int32_t rank, std::span<const std::string> names) {
  std::string out = "rank " + std::to_string(rank);
  const auto place = static_cast<size_t>(rank);
  if (place < names.size() && !names[place].empty()) out += " (" + names[place] + ")";
  return out;
}

std::string join_some(std::span<const std::string> parts, size_t limit,
                      std::string_view separator) {
  std::string out;
  for (size_t i = 0; i < parts.size() && i < limit; ++i) {
    if (i > 0) out += separator;
    out += parts[i];
  }
  if (parts.size() > limit) out += " and " + std::to_string(parts.size() - limit) + " more";
  return out;
}

}  // namespace horovod
