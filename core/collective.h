// L3: one call of a user and how an agreed entry of calls becomes schedule runs on their tensors:
// views, sizes that only the data plane knows, outputs. Must not know negotiation, threads or
// handles.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "adasum.h"
#include "algorithms.h"
#include "mesh.h"
#include "types.h"

namespace horovod {

struct Tensor {
  std::byte* in = nullptr;
  std::byte* out = nullptr;  // null: the collective allocates the output
  DType dtype = DType::UInt8;
  Shape shape;  // of the input
};

// Memory of the core's own, handed to the caller; aligned to kAlignment.
struct Output {
  std::shared_ptr<std::byte> data;
  uint64_t bytes = 0;
  DType dtype = DType::UInt8;
  Shape shape;
};

// What a collective needs of one call and gives back to it.
struct Arguments {
  OpKind kind = OpKind::Allreduce;
  ReduceOp op = ReduceOp::Sum;
  int32_t root = 0;  // global rank
  double prescale = 1.0;
  double postscale = 1.0;
  std::vector<Tensor> tensors;
  std::vector<int64_t> splits;  // alltoall: rows to each member
  bool has_splits = false;      // else equal parts
  // Gives memory for the output of a tensor whose `out` is null, of this shape; the core's own is
  // used if this is empty. Called by the driver; null if memory was refused.
  std::function<std::byte*(size_t tensor, const Shape& shape)> allocate;

  std::vector<Output> outputs;           // one per tensor whose `out` was null, of the core's own
  std::vector<int64_t> received_splits;  // alltoall: rows from each member
};

// Throws Error(InvalidArgument) if this rank's call is wrong by itself. `members` are the global
// ranks of its process set.
void check_arguments(const Arguments& call, std::span<const int32_t> members);

// What a small allreduce tells with its announcement: what its tensors hold, end to end. Empty if
// that, from all `members`, would take more than `terms_bytes`, or if it is another operation.
std::string payload_of(const Arguments& call, size_t members, uint64_t terms_bytes);

// The allreduce of calls whose payloads have come, of each of `contributors` in turn those of all
// calls. The same bits as if they had gone through slots. Throws Error(InvalidArgument) if `terms`
// can't be those of the calls, and as Collective does.
void reduce_payloads(std::span<Arguments* const> calls, size_t members, size_t contributors,
                     std::span<const std::byte> terms, const Kernels& kernels);

// Who runs an entry, and with which pieces.
struct Group {
  std::vector<int32_t> members;  // of the process set, ascending
  std::vector<int32_t>
      contributors;  // those that take part: the members but the joined ones, ascending
  int32_t rank = 0;  // own global rank
  uint64_t segment_bytes = 0;
  uint64_t direct_bytes = 0;  // up to this many bytes an allreduce goes direct
  const Kernels* kernels = nullptr;
};

// The calls of one entry while they run. They are fused: their tensors are one virtual vector.
class Collective {
 public:
  // Throws Error(Resource) if an output can't be allocated. `calls` outlive it.
  Collective(std::vector<Arguments*> calls, Group group);

  bool advance(Mesh& mesh, bool oldest);  // whether anything moved; throws as the constructor does
  bool finished() const { return finished_; }

 private:
  Place place() const;
  void start_first_round();
  void start(Schedule schedule, std::vector<View> in, std::vector<View> out, FoldSpec fold = {});
  void start_allreduce();
  void start_broadcast();
  void start_reducescatter();
  void exchange_gather_sizes();
  void start_allgather();
  void exchange_splits();
  void start_alltoall();
  void start_adasum();
  void multiply_adasum();
  void merge_adasum();
  void combine_adasum();

  std::vector<Arguments*> calls_;
  Group group_;
  int32_t place_ = 0;
  Run run_;
  bool finished_ = false;
  void (Collective::*next_)() = nullptr;    // what follows the run in flight
  std::vector<int64_t> own_sizes_, sizes_;  // of the first round of gathers and alltoall

  // Of Adasum. The others' values of this rank's chunks: less than what the tensors of the entry
  // take, freed before their results travel.
  std::shared_ptr<std::byte> scratch_;
  std::unique_ptr<Adasum> adasum_;
  std::vector<double> products_;  // everybody's, of one level
  std::vector<View> results_;     // chunks of the outputs: of each rank each tensor's
};

}  // namespace horovod
