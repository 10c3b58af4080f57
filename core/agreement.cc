// L4: the checks of agreement, as a table in their documented order.
#include "agreement.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>
#include <vector>

#include "describe.h"

namespace horovod {
namespace {

bool same_bits(double a, double b) {
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}

bool reduces_data(const Request& r) { return info(r.kind).reduces; }

// One thing that ranks have to agree on. `tensor` is the place in a grouped call, 0 in checks that
// concern the call as a whole.
struct Check {
  std::string_view label;
  bool each_tensor;
  bool (*applies)(const Request&);
  bool (*same)(const Request&, const Request&, size_t tensor);
  std::string (*show)(const Request&, size_t tensor);
};

constexpr Check kDType{
    "", true, [](const Request&) { return true; },
    [](const Request& a, const Request& b, size_t t) {
      return a.tensors[t].dtype == b.tensors[t].dtype;
    },
    [](const Request& r, size_t t) { return std::string(info(r.tensors[t].dtype).name); }};

constexpr Check kKind{"operation", false, [](const Request&) { return true; },
                      [](const Request& a, const Request& b, size_t) { return a.kind == b.kind; },
                      [](const Request& r, size_t) { return std::string(info(r.kind).name); }};

constexpr Check kCount{
    "number of tensors", false, [](const Request&) { return true; },
    [](const Request& a, const Request& b, size_t) { return a.tensors.size() == b.tensors.size(); },
    [](const Request& r, size_t) { return std::to_string(r.tensors.size()); }};

constexpr bool same_shape(const Request& a, const Request& b, size_t t) {
  return a.tensors[t].shape == b.tensors[t].shape;
}

std::string show_shape(const Request& r, size_t t) { return to_string(r.tensors[t].shape); }

constexpr Check kShape{"shape", true, [](const Request& r) { return !info(r.kind).own_rows; },
                       same_shape, show_shape};

constexpr Check kPrescale{
    "prescale factor", false, reduces_data,
    [](const Request& a, const Request& b, size_t) { return same_bits(a.prescale, b.prescale); },
    [](const Request& r, size_t) { return describe_number(r.prescale); }};

constexpr Check kPostscale{
    "postscale factor", false, reduces_data,
    [](const Request& a, const Request& b, size_t) { return same_bits(a.postscale, b.postscale); },
    [](const Request& r, size_t) { return describe_number(r.postscale); }};

constexpr Check kReduceOp{"reduce op", false, reduces_data,
                          [](const Request& a, const Request& b, size_t) { return a.op == b.op; },
                          [](const Request& r, size_t) { return std::string(name_of(r.op)); }};

constexpr Check kRows{"dimensions after the first", true,
                      [](const Request& r) { return info(r.kind).own_rows; }, same_shape,
                      show_shape};

constexpr Check kRoot{"root rank", false, [](const Request& r) { return info(r.kind).rooted; },
                      [](const Request& a, const Request& b, size_t) { return a.root == b.root; },
                      [](const Request& r, size_t) { return std::to_string(r.root); }};

constexpr Check kMembers{
    "ranks", false, [](const Request& r) { return r.kind == OpKind::AddSet; },
    [](const Request& a, const Request& b, size_t) { return a.ranks == b.ranks; },
    [](const Request& r, size_t) { return describe_ranks(r.ranks); }};

constexpr Check kRemoved{
    "process set", false, [](const Request& r) { return r.kind == OpKind::RemoveSet; },
    [](const Request& a, const Request& b, size_t) { return a.root == b.root; },
    [](const Request& r, size_t) { return std::to_string(r.root); }};

// `ranks 0-1 sent float32, rank 2 float16`, grouped by value; blames the one rank that stands
// alone.
Status explain(const Check& check, size_t tensor, std::span<const Vote> votes) {
  struct Group {
    const Request* request;
    std::vector<int32_t> ranks;
  };
  std::vector<Group> groups;
  for (const Vote& vote : votes) {
    const auto it = std::find_if(groups.begin(), groups.end(), [&](const Group& group) {
      return check.same(*group.request, *vote.request, tensor);
    });
    if (it == groups.end()) {
      groups.push_back({vote.request, {vote.rank}});
    } else {
      it->ranks.push_back(vote.rank);
    }
  }
  std::vector<std::string> parts;
  int32_t blamed = -1;
  size_t alone = 0;
  for (const Group& group : groups) {
    parts.push_back(describe_ranks(group.ranks) + (parts.empty() ? " sent " : " ") +
                    check.show(*group.request, tensor));
    if (group.ranks.size() == 1) {
      blamed = group.ranks.front();
      ++alone;
    }
  }
  const Request& first = *votes.front().request;
  std::string text = describe_call(first.kind, first.name) + ": ";
  if (!check.label.empty()) text.append(check.label).append(": ");
  if (check.each_tensor && first.tensors.size() > 1) {
    text += "tensor " + std::to_string(tensor) + " of the group: ";
  }
  constexpr size_t kMostGroups = 16;
  return {ErrorKind::Mismatch, text + join_some(parts, kMostGroups, ", "),
          alone == 1 && groups.size() < votes.size() ? blamed : -1};
}

// `shared`: the tensors that every vote has.
Status look(const Check& check, std::span<const Vote> votes, size_t shared) {
  const Request& first = *votes.front().request;
  if (!check.applies(first)) return {};
  const size_t tensors = check.each_tensor ? shared : 1;
  for (size_t t = 0; t < tensors; ++t) {
    for (const Vote& vote : votes) {
      if (vote.request != &first && !check.same(first, *vote.request, t)) {
        return explain(check, t, votes);
      }
    }
  }
  return {};
}

Status refuse_joined(const Request& request, std::span<const int32_t> joined) {
  if (joined.empty()) return {};
  return {ErrorKind::Mismatch,
          describe_call(request.kind, request.name) + ": " + describe_ranks(joined) +
              (joined.size() == 1 ? " has joined, and " : " have joined, and ") +
              std::string(info(request.kind).name) + " can't leave anyone out",
          joined.size() == 1 ? joined.front() : -1};
}

bool has_scalar(const Request& request) {
  const OpInfo& op = info(request.kind);
  if (!op.needs_rows) return false;
  if (op.own_rows) return request.scalar;
  return std::any_of(request.tensors.begin(), request.tensors.end(),
                     [](const TensorSpec& tensor) { return tensor.shape.empty(); });
}

Status refuse_scalars(std::span<const Vote> votes) {
  std::vector<int32_t> ranks;
  for (const Vote& vote : votes) {
    if (has_scalar(*vote.request)) ranks.push_back(vote.rank);
  }
  if (ranks.empty()) return {};
  const Request& first = *votes.front().request;
  return {ErrorKind::Mismatch,
          describe_call(first.kind, first.name) + ": " + describe_ranks(ranks) +
              " sent a 0-d tensor, and " + std::string(info(first.kind).name) +
              " needs a first dimension",
          ranks.size() == 1 && votes.size() > 1 ? ranks.front() : -1};
}

}  // namespace

Status disagreement(std::span<const Vote> votes, std::span<const int32_t> joined) {
  const Request& first = *votes.front().request;
  size_t shared = first.tensors.size();
  for (const Vote& vote : votes) shared = std::min(shared, vote.request->tensors.size());

  for (const Check* check : {&kDType, &kKind, &kCount, &kShape, &kPrescale, &kPostscale, &kReduceOp,
                             &kMembers, &kRemoved}) {
    if (Status status = look(*check, votes, shared); !status.ok()) return status;
  }
  if (Status status = refuse_joined(first, joined); !status.ok()) return status;
  if (Status status = refuse_scalars(votes); !status.ok()) return status;
  for (const Check* check : {&kRows, &kRoot}) {
    if (Status status = look(*check, votes, shared); !status.ok()) return status;
  }
  return {};
}

}  // namespace horovod
