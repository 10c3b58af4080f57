// L3: entries as schedule runs. Must not know negotiation, threads or handles.

#include "collective.h"

#include <algorithm>
#include <limits>
#include <new>
#include <numeric>
#include <string>
#include <utility>

#include "algorithms.h"

namespace horovod {
namespace {

[[noreturn]] void invalid(const std::string& text) {
  throw Error(ErrorKind::InvalidArgument, text);
}

// Bytes of one row, or of all of it for a 0-d tensor.
uint64_t row_bytes(const Tensor& t) {
  uint64_t bytes = info(t.dtype).size;
  for (size_t d = 1; d < t.shape.size(); ++d) bytes *= static_cast<uint64_t>(t.shape[d]);
  return bytes;
}

uint64_t bytes_of(const Tensor& t) { return count_of(t.shape) * info(t.dtype).size; }

void check_tensor(const Tensor& t) {
  uint64_t bytes = info(t.dtype).size;
  bool empty = false;
  for (const int64_t d : t.shape) {
    if (d < 0) invalid("a negative dimension in shape " + to_string(t.shape));
    empty = empty || d == 0;
    const auto n = static_cast<uint64_t>(std::max<int64_t>(d, 1));
    if (bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) / n) {
      invalid("shape " + to_string(t.shape) + " has more than 2^63 bytes");
    }
    bytes *= n;
  }
  if (t.in == nullptr && !empty) invalid("a tensor without memory");
}

std::shared_ptr<std::byte> new_memory(uint64_t bytes, std::string_view what, OpKind kind) {
  constexpr std::align_val_t alignment{kAlignment};
  // At least one line, so that an empty output has an address too.
  void* memory = ::operator new(std::max<uint64_t>(bytes, kAlignment), alignment, std::nothrow);
  if (memory == nullptr) {
    throw Error(ErrorKind::Resource, "no memory for " + std::string(what) + " of " +
                                         std::to_string(bytes) + " bytes (" +
                                         std::string(info(kind).name) + ")");
  }
  return {static_cast<std::byte*>(memory), [](std::byte* p) { ::operator delete(p, alignment); }};
}

std::byte* allocate(Arguments& call, const Tensor& like, Shape shape) {
  if (call.allocate) {
    std::byte* memory = call.allocate(static_cast<size_t>(&like - call.tensors.data()), shape);
    if (memory != nullptr) return memory;
    throw Error(ErrorKind::Resource, "no memory for an output of shape " + to_string(shape) + " (" +
                                         std::string(info(call.kind).name) + ")");
  }
  Output output{.data = {}, .bytes = 0, .dtype = like.dtype, .shape = std::move(shape)};
  output.bytes = count_of(output.shape) * info(like.dtype).size;
  output.data = new_memory(output.bytes, "an output", call.kind);
  call.outputs.push_back(output);
  return output.data.get();
}

std::byte* output_of(Arguments& call, const Tensor& t, const Shape& shape) {
  return t.out != nullptr ? t.out : allocate(call, t, shape);
}

// Rows of `total` that member `m` of `n` gets: as even as can be, the longer parts first.
std::pair<int64_t, int64_t> rows_of(int64_t total, size_t m, size_t n) {
  const auto k = static_cast<int64_t>(m), parts = static_cast<int64_t>(n);
  const int64_t base = total / parts, longer = total % parts;
  return {base * k + std::min(k, longer), base + (k < longer ? 1 : 0)};
}

size_t index_of(std::span<const int32_t> ranks, int32_t rank) {
  return static_cast<size_t>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

View view(std::byte* data, uint64_t bytes, DType dtype) { return {data, bytes, dtype}; }

View view(std::vector<int64_t>& numbers, size_t first, size_t count) {
  return {reinterpret_cast<std::byte*>(numbers.data() + first), count * sizeof(int64_t),
          DType::Int64};
}

View view(std::vector<double>& numbers, size_t first, size_t count) {
  return {reinterpret_cast<std::byte*>(numbers.data() + first), count * sizeof(double),
          DType::Float64};
}

// Average is a sum with a divisor: the whole set's size, also when some have joined.
FoldSpec fold_of(const Arguments& call, size_t members) {
  const bool average = call.op == ReduceOp::Average;
  return {.op = average ? ReduceOp::Sum : call.op,
          .prescale = call.prescale,
          .postscale = call.postscale,
          .divisor = average ? static_cast<uint32_t>(members) : 1};
}

// What folds its terms in rank order and nothing else.
bool is_plain_allreduce(const Arguments& call) {
  return call.kind == OpKind::Allreduce && call.op != ReduceOp::Adasum;
}

uint64_t bytes_of(const Arguments& call) {
  uint64_t bytes = 0;
  for (const Tensor& t : call.tensors) bytes += bytes_of(t);
  return bytes;
}

}  // namespace

std::string payload_of(const Arguments& call, size_t members, uint64_t terms_bytes) {
  if (!is_plain_allreduce(call)) return {};
  const uint64_t bytes = bytes_of(call);
  if (bytes > terms_bytes / members) return {};
  std::string payload;
  payload.reserve(bytes);
  for (const Tensor& t : call.tensors) {
    payload.append(reinterpret_cast<const char*>(t.in), bytes_of(t));
  }
  return payload;
}

void reduce_payloads(std::span<Arguments* const> calls, size_t members, size_t contributors,
                     std::span<const std::byte> terms, const Kernels& kernels) {
  uint64_t payload_bytes = 0;
  for (const Arguments* call : calls) {
    if (!is_plain_allreduce(*call)) invalid("terms of a call that isn't folded in rank order");
    payload_bytes += bytes_of(*call);
  }
  if (terms.size() != payload_bytes * contributors) {
    invalid(std::to_string(terms.size()) + " bytes of terms where " + std::to_string(contributors) +
            " times " + std::to_string(payload_bytes) + " were due");
  }
  std::vector<const std::byte*> next(contributors);  // of each contributor, what is folded next
  for (size_t i = 0; i < contributors; ++i) next[i] = terms.data() + i * payload_bytes;
  for (Arguments* call : calls) {
    FoldSpec spec = fold_of(*call, members);
    for (const Tensor& t : call->tensors) {
      const uint64_t bytes = bytes_of(t);
      std::byte* out = output_of(*call, t, t.shape);
      spec.dtype = t.dtype;
      if (bytes > 0) {
        kernels.fold(spec, out, nullptr, Stores::Ordinary, next.data(), contributors,
                     count_of(t.shape));
      }
      for (const std::byte*& term : next) term += bytes;
    }
  }
}

void check_arguments(const Arguments& call, std::span<const int32_t> members) {
  const OpInfo& op = info(call.kind);
  for (const Tensor& t : call.tensors) {
    check_tensor(t);
    if (op.needs_rows && t.shape.empty()) {
      invalid("a 0-d tensor has no rows to split or concatenate; give it a first dimension");
    }
    if (call.kind == OpKind::Reducescatter && call.op == ReduceOp::Adasum) {
      invalid("Adasum is for allreduce only");
    }
    if (op.reduces && !reduces(call.op, t.dtype)) {
      invalid(std::string(name_of(call.op)) + " isn't defined for " +
              std::string(info(t.dtype).name) + " tensors");
    }
    const bool scales = call.prescale != 1.0 || call.postscale != 1.0;
    if (op.reduces && t.dtype == DType::Bool && scales) {
      invalid("scale factors aren't defined for bool tensors");
    }
  }
  if (op.moves_data && call.tensors.empty()) invalid("no tensors were given");
  if (op.rooted && !std::binary_search(members.begin(), members.end(), call.root)) {
    invalid("root rank " + std::to_string(call.root) + " is not in the process set");
  }
  if (call.kind != OpKind::Alltoall) return;
  if (call.tensors.size() != 1) invalid("alltoall takes one tensor");
  const int64_t rows = call.tensors[0].shape[0];
  const auto n = static_cast<int64_t>(members.size());
  if (!call.has_splits) {
    if (rows % n != 0) {
      invalid("dimension 0 (" + std::to_string(rows) + ") can't be split evenly over " +
              std::to_string(n) + " ranks; give splits");
    }
    return;
  }
  if (static_cast<int64_t>(call.splits.size()) != n) {
    invalid(std::to_string(call.splits.size()) + " splits for a process set of " +
            std::to_string(n) + " ranks");
  }
  int64_t left = rows;
  for (const int64_t split : call.splits) {
    if (split < 0) invalid("a negative split: " + std::to_string(split));
    if (split > left) {
      invalid("the splits add up to more than the " + std::to_string(rows) + " rows of the tensor");
    }
    left -= split;
  }
}

Collective::Collective(std::vector<Arguments*> calls, Group group)
    : calls_(std::move(calls)), group_(std::move(group)) {
  place_ = static_cast<int32_t>(index_of(group_.contributors, group_.rank));
  start_first_round();
}

void Collective::start_first_round() {
  switch (calls_.front()->kind) {
    case OpKind::Allreduce:
      return calls_.front()->op == ReduceOp::Adasum ? start_adasum() : start_allreduce();
    case OpKind::Broadcast:
      return start_broadcast();
    case OpKind::Reducescatter:
      return start_reducescatter();
    case OpKind::Allgather:
      return exchange_gather_sizes();
    case OpKind::Alltoall:
      return exchange_splits();
    default:
      finished_ = true;  // nothing to move
  }
}

bool Collective::advance(Mesh& mesh, bool oldest) {
  const bool moved = mesh.advance(run_, oldest);
  // The next round's slots go before those of any younger entry.
  if (next_ != nullptr) mesh.close();
  if (!run_.finished()) return moved;
  if (next_ == nullptr) {
    finished_ = true;
  } else {
    const auto next = std::exchange(next_, nullptr);
    (this->*next)();
  }
  return true;
}

Place Collective::place() const {
  return {place_, static_cast<int32_t>(group_.contributors.size()), group_.segment_bytes};
}

void Collective::start(Schedule schedule, std::vector<View> in, std::vector<View> out,
                       FoldSpec fold) {
  const bool timed = place_ == 0 && schedule.bytes_sent() >= StoreChoice::kLeastBytes;
  run_ = Run{.schedule = std::move(schedule),
             .in = VirtualVector(std::move(in)),
             .out = VirtualVector(std::move(out)),
             .group = group_.contributors,
             .fold = fold,
             .timed = timed};
}

namespace {

uint64_t padded(std::span<const View> views) {
  uint64_t bytes = 0;
  for (const View& v : views) bytes += align_up(v.bytes);
  return bytes;
}

}  // namespace

void Collective::start_allreduce() {
  std::vector<View> in, out;
  for (Arguments* call : calls_) {
    for (const Tensor& t : call->tensors) {
      in.push_back(view(t.in, bytes_of(t), t.dtype));
      out.push_back(view(output_of(*call, t, t.shape), bytes_of(t), t.dtype));
    }
  }
  const uint64_t bytes = padded(in);
  const Place p = place();
  start(bytes <= group_.direct_bytes ? allreduce_direct(p, bytes) : allreduce_chunked(p, bytes),
        std::move(in), std::move(out), fold_of(*calls_.front(), group_.members.size()));
}

void Collective::start_broadcast() {
  Arguments& call = *calls_.front();
  std::vector<View> in, out;
  for (const Tensor& t : call.tensors) {
    in.push_back(view(t.in, bytes_of(t), t.dtype));
    out.push_back(view(output_of(call, t, t.shape), bytes_of(t), t.dtype));
  }
  const auto root = static_cast<int32_t>(index_of(group_.contributors, call.root));
  const uint64_t bytes = padded(in);
  start(broadcast(place(), root, bytes), std::move(in), std::move(out));
}

void Collective::start_reducescatter() {
  Arguments& call = *calls_.front();
  std::vector<View> in, out;
  std::vector<uint64_t> chunks;
  for (const int32_t owner : group_.contributors) {
    const size_t m = index_of(group_.members, owner);
    std::vector<View> chunk;
    for (const Tensor& t : call.tensors) {
      const auto [first, rows] = rows_of(t.shape[0], m, group_.members.size());
      const uint64_t row = row_bytes(t);
      const uint64_t bytes = static_cast<uint64_t>(rows) * row;
      chunk.push_back(view(t.in + static_cast<uint64_t>(first) * row, bytes, t.dtype));
      if (owner == group_.rank) {
        Shape shape = t.shape;
        shape[0] = rows;
        out.push_back(view(output_of(call, t, shape), bytes, t.dtype));
      }
    }
    chunks.push_back(padded(chunk));
    in.insert(in.end(), chunk.begin(), chunk.end());
  }
  start(reducescatter(place(), chunks), std::move(in), std::move(out),
        fold_of(call, group_.members.size()));
}

// First round of a gather: every rank tells its rows of each tensor.
void Collective::exchange_gather_sizes() {
  const Arguments& call = *calls_.front();
  const size_t tensors = call.tensors.size(), n = group_.contributors.size();
  for (const Tensor& t : call.tensors) own_sizes_.push_back(t.shape[0]);
  sizes_.resize(n * tensors);
  std::vector<View> out;
  for (size_t r = 0; r < n; ++r) out.push_back(view(sizes_, r * tensors, tensors));
  const std::vector<uint64_t> chunks(n, align_up(tensors * sizeof(int64_t)));
  start(allgather(place(), chunks), {view(own_sizes_, 0, tensors)}, std::move(out));
  next_ = &Collective::start_allgather;
}

void Collective::start_allgather() {
  Arguments& call = *calls_.front();
  const size_t tensors = call.tensors.size(), n = group_.contributors.size();
  std::vector<std::byte*> next_row;  // of each output
  for (size_t i = 0; i < tensors; ++i) {
    const Tensor& t = call.tensors[i];
    Shape shape = t.shape;
    shape[0] = 0;
    for (size_t r = 0; r < n; ++r) shape[0] += sizes_[r * tensors + i];
    next_row.push_back(output_of(call, t, shape));
  }
  std::vector<View> in, out;
  for (const Tensor& t : call.tensors) in.push_back(view(t.in, bytes_of(t), t.dtype));
  std::vector<uint64_t> chunks;
  for (size_t r = 0; r < n; ++r) {
    uint64_t chunk = 0;
    for (size_t i = 0; i < tensors; ++i) {
      const Tensor& t = call.tensors[i];
      const uint64_t bytes = static_cast<uint64_t>(sizes_[r * tensors + i]) * row_bytes(t);
      out.push_back(view(next_row[i], bytes, t.dtype));
      next_row[i] += bytes;
      chunk += align_up(bytes);
    }
    chunks.push_back(chunk);
  }
  start(allgather(place(), chunks), std::move(in), std::move(out));
}

// First round of an alltoall: every rank tells each other how many rows are for it.
void Collective::exchange_splits() {
  Arguments& call = *calls_.front();
  const size_t n = group_.contributors.size();
  if (!call.has_splits) {
    const auto members = static_cast<int64_t>(group_.members.size());
    call.splits.assign(group_.members.size(), call.tensors[0].shape[0] / members);
  }
  own_sizes_ = call.splits;
  sizes_.resize(n);
  std::vector<View> in, out;
  for (size_t r = 0; r < n; ++r) {
    in.push_back(view(own_sizes_, index_of(group_.members, group_.contributors[r]), 1));
    out.push_back(view(sizes_, r, 1));
  }
  const std::vector<uint64_t> chunks(n, align_up(sizeof(int64_t)));
  start(alltoall(place(), chunks, chunks), std::move(in), std::move(out));
  next_ = &Collective::start_alltoall;
}

void Collective::start_alltoall() {
  Arguments& call = *calls_.front();
  const Tensor& t = call.tensors[0];
  const uint64_t row = row_bytes(t);
  const size_t n = group_.contributors.size();
  Shape shape = t.shape;
  shape[0] = std::accumulate(sizes_.begin(), sizes_.end(), int64_t{0});
  std::byte* to = output_of(call, t, shape);
  call.received_splits.assign(group_.members.size(), 0);  // a joined rank sends nothing
  std::vector<int64_t> first_row(call.splits.size() + 1, 0);
  std::partial_sum(call.splits.begin(), call.splits.end(), first_row.begin() + 1);
  std::vector<View> in, out;
  std::vector<uint64_t> sent, received;
  for (size_t r = 0; r < n; ++r) {
    const size_t m = index_of(group_.members, group_.contributors[r]);
    const uint64_t out_bytes = static_cast<uint64_t>(call.splits[m]) * row;
    in.push_back(view(t.in + static_cast<uint64_t>(first_row[m]) * row, out_bytes, t.dtype));
    sent.push_back(align_up(out_bytes));
    const uint64_t in_bytes = static_cast<uint64_t>(sizes_[r]) * row;
    out.push_back(view(to, in_bytes, t.dtype));
    received.push_back(align_up(in_bytes));
    to += in_bytes;
    call.received_splits[m] = sizes_[r];
  }
  start(alltoall(place(), sent, received), std::move(in), std::move(out));
}

// Adasum (see adasum.h). Every rank owns one chunk of each tensor, as even as elements allow, and
// gets everybody's values of it: an alltoall, (n-1)/n x bytes each way. For each level of the tree,
// log2(n) of them, all compute the products on their chunks and tell them to all: three doubles a
// pair and tensor. Then each has the same factors, computes its chunks of the results and sends
// them to all: (n-1)/n x bytes each way again. Chunks depend on a tensor's count alone, not on its
// company, so its result doesn't either.
void Collective::start_adasum() {
  const auto n = static_cast<size_t>(place().size), self = static_cast<size_t>(place_);
  std::vector<Adasum::Chunk> chunks;
  std::vector<std::vector<View>> in(n), results(n);
  std::vector<uint64_t> to, from;
  for (Arguments* call : calls_) {
    for (const Tensor& t : call->tensors) {
      std::byte* out = output_of(*call, t, t.shape);
      const uint64_t size = info(t.dtype).size;
      for (size_t r = 0; r < n; ++r) {
        const auto [first, count] = rows_of(static_cast<int64_t>(count_of(t.shape)), r, n);
        const uint64_t begin = static_cast<uint64_t>(first) * size;
        const uint64_t bytes = static_cast<uint64_t>(count) * size;
        in[r].push_back(view(t.in + begin, bytes, t.dtype));
        results[r].push_back(view(out + begin, bytes, t.dtype));
        if (r == self) {
          chunks.push_back({.terms = std::vector<const std::byte*>(n, t.in + begin),
                            .out = out + begin,
                            .dtype = t.dtype,
                            .count = static_cast<uint64_t>(count)});
        }
      }
    }
  }
  const uint64_t own = padded(in[self]);
  scratch_ = new_memory(own * (n - 1), "the scratch of Adasum", OpKind::Allreduce);
  std::byte* next = scratch_.get();
  std::vector<View> sent, received;
  for (size_t r = 0; r < n; ++r) {
    results_.insert(results_.end(), results[r].begin(), results[r].end());
    to.push_back(r == self ? 0 : padded(in[r]));
    from.push_back(r == self ? 0 : own);
    if (r == self) continue;
    sent.insert(sent.end(), in[r].begin(), in[r].end());
    for (size_t i = 0; i < chunks.size(); ++i) {
      const View& mine = in[self][i];
      received.push_back(view(next, mine.bytes, mine.dtype));
      chunks[i].terms[r] = next;
      next += align_up(mine.bytes);
    }
  }
  adasum_ = std::make_unique<Adasum>(*group_.kernels, std::move(chunks), n);
  adasum_->scale(calls_.front()->prescale);
  start(alltoall(place(), to, from), std::move(sent), std::move(received));
  next_ = &Collective::multiply_adasum;
}

void Collective::multiply_adasum() {
  if (adasum_->merged()) {
    adasum_->scale(calls_.front()->postscale);
    return combine_adasum();
  }
  if (!adasum_->multiply()) {
    next_ = &Collective::multiply_adasum;
    return;
  }
  const size_t count = adasum_->products().size(), n = group_.contributors.size();
  products_.resize(n * count);
  std::vector<View> out;
  for (size_t r = 0; r < n; ++r) out.push_back(view(products_, r * count, count));
  const std::vector<uint64_t> chunks(n, align_up(count * sizeof(double)));
  start(allgather(place(), chunks), {view(adasum_->products(), 0, count)}, std::move(out));
  next_ = &Collective::merge_adasum;
}

void Collective::merge_adasum() {
  adasum_->merge(products_);
  multiply_adasum();
}

void Collective::combine_adasum() {
  if (!adasum_->combine()) {
    next_ = &Collective::combine_adasum;
    return;
  }
  adasum_.reset();
  scratch_.reset();
  const size_t n = group_.contributors.size(), tensors = results_.size() / n;
  std::vector<uint64_t> chunks;
  for (size_t r = 0; r < n; ++r) {
    chunks.push_back(padded(std::span(results_).subspan(r * tensors, tensors)));
  }
  const auto own = results_.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(place_) * tensors);
  start(allgather(place(), chunks), {own, own + static_cast<ptrdiff_t>(tensors)}, results_);
}

}  // namespace horovod
