// The operators as a table, and their kernels and shapes. Must not know how a call travels.
//
// All are stateful: TensorFlow neither folds, merges nor drops them. Python marks those in graphs
// as independent of other stateful ones, so that they still run at once.

#include "ops.h"

#include <dlfcn.h>

#include <bit>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <vector>

#include "api.h"
#include "flight.h"

namespace horovod::tensorflow {
namespace {

// ---- Shapes -----------------------------------------------------------------------------------

class ShapeHandle {
 public:
  ShapeHandle() : handle_(tf.TF_NewShapeHandle()) {}
  explicit ShapeHandle(TF_ShapeHandle* handle) : handle_(handle) {}
  ~ShapeHandle() { tf.TF_DeleteShapeHandle(handle_); }
  ShapeHandle(const ShapeHandle&) = delete;
  operator TF_ShapeHandle*() const { return handle_; }

 private:
  TF_ShapeHandle* handle_;
};

constexpr size_t kUnknownSize = static_cast<size_t>(-1);
constexpr int64_t kToEnd = INT64_MAX;

void same_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  for (int i = 0; i < tf.TF_ShapeInferenceContextNumInputs(context); ++i) {
    const ShapeHandle shape;
    tf.TF_ShapeInferenceContextGetInput(context, i, shape, status);
    if (tf.TF_GetCode(status) != kOk) return;
    tf.TF_ShapeInferenceContextSetOutput(context, i, shape, status);
  }
}

// Output `i` has rows like input `i`, nobody knows how many.
void other_rows_of(TF_ShapeInferenceContext* context, int i, TF_Status* status) {
  const ShapeHandle input, checked, row, output;
  const auto failed = [&] { return tf.TF_GetCode(status) != kOk; };
  tf.TF_ShapeInferenceContextGetInput(context, i, input, status);
  if (failed() || tf.TF_ShapeInferenceContextRankKnown(context, input) == 0) return;
  tf.TF_ShapeInferenceContextWithRankAtLeast(context, input, 1, checked, status);
  if (failed()) return;
  tf.TF_ShapeInferenceContextSubshape(context, checked, 1, kToEnd, row, status);
  if (failed()) return;
  const ShapeHandle rows(tf.TF_ShapeInferenceContextVectorFromSize(context, kUnknownSize));
  tf.TF_ShapeInferenceContextConcatenateShapes(context, rows, row, output, status);
  if (!failed()) tf.TF_ShapeInferenceContextSetOutput(context, i, output, status);
}

void other_rows(TF_ShapeInferenceContext* context, TF_Status* status) {
  tf.TF_ShapeInferenceContextSetUnknownShape(context, status);
  for (int i = 0; i < tf.TF_ShapeInferenceContextNumInputs(context); ++i) {
    if (tf.TF_GetCode(status) == kOk) other_rows_of(context, i, status);
  }
}

void alltoall_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  tf.TF_ShapeInferenceContextSetUnknownShape(context, status);
  if (tf.TF_GetCode(status) == kOk) other_rows_of(context, 0, status);
  const ShapeHandle members(tf.TF_ShapeInferenceContextVectorFromSize(context, kUnknownSize));
  if (tf.TF_GetCode(status) == kOk) {
    tf.TF_ShapeInferenceContextSetOutput(context, 1, members, status);
  }
}

void scalar_shape(TF_ShapeInferenceContext* context, TF_Status* status) {
  const ShapeHandle scalar(tf.TF_ShapeInferenceContextScalar(context));
  tf.TF_ShapeInferenceContextSetOutput(context, 0, scalar, status);
}

// ---- Attributes -------------------------------------------------------------------------------

std::string text_attribute(TF_OpKernelConstruction* construction, const char* name,
                           const Report& report) {
  int32_t list = 0, bytes = 0;
  tf.TF_OpKernelConstruction_GetAttrSize(construction, name, &list, &bytes, report);
  std::string text(report.ok() && bytes > 0 ? static_cast<size_t>(bytes) : 0, '\0');
  if (text.empty()) return text;
  tf.TF_OpKernelConstruction_GetAttrString(construction, name, text.data(), text.size(), report);
  return text;
}

int64_t number_attribute(TF_OpKernelConstruction* construction, const char* name,
                         const Report& report) {
  int64_t value = 0;
  tf.TF_OpKernelConstruction_GetAttrInt64(construction, name, &value, report);
  return value;
}

// A factor travels as the bits of a double: an attribute of TensorFlow's is a float, which is too
// coarse for float64 tensors.
constexpr const char* kOne = "4607182418800017408";
static_assert(std::bit_cast<double>(int64_t{4607182418800017408}) == 1.0);

// ---- Collectives ------------------------------------------------------------------------------

struct OpRow {
  const char* name;
  OpKind kind;
  std::initializer_list<const char*> inputs, outputs;
  InferShapes shapes;
};

#define HOROVOD_TYPES                                                                           \
  "{uint8, int8, uint16, int16, int32, int64, half, bfloat16, float, double, bool, complex64, " \
  "complex128}"
constexpr const char* kType = "T: " HOROVOD_TYPES;
constexpr const char* kTypes = "T: list(" HOROVOD_TYPES ") >= 1";

const OpRow kCollectives[] = {
    {"HorovodAllreduce", OpKind::Allreduce, {"tensor: T"}, {"sum: T"}, same_shapes},
    {"HorovodGroupedAllreduce", OpKind::Allreduce, {"tensors: T"}, {"sums: T"}, same_shapes},
    {"HorovodAllgather", OpKind::Allgather, {"tensor: T"}, {"output: T"}, other_rows},
    {"HorovodGroupedAllgather", OpKind::Allgather, {"tensors: T"}, {"outputs: T"}, other_rows},
    {"HorovodBroadcast", OpKind::Broadcast, {"tensor: T"}, {"output: T"}, same_shapes},
    {"HorovodReducescatter", OpKind::Reducescatter, {"tensor: T"}, {"output: T"}, other_rows},
    {"HorovodGroupedReducescatter",
     OpKind::Reducescatter,
     {"tensors: T"},
     {"outputs: T"},
     other_rows},
    {"HorovodAlltoall",
     OpKind::Alltoall,
     {"tensor: T", "splits: S"},
     {"output: T", "received_splits: int32"},
     alltoall_shapes},
    {"HorovodJoin", OpKind::Join, {}, {"last: int32"}, scalar_shape},
    {"HorovodBarrier", OpKind::Barrier, {}, {}, nullptr},
};

struct Kernel {
  std::shared_ptr<const Node> node;
};

template <const OpRow* kRow>
void* create(TF_OpKernelConstruction* construction) {
  const Report report;
  auto node = std::make_shared<Node>();
  node->type = kRow->name;
  node->kind = kRow->kind;
  node->name = text_attribute(construction, "tensor_name", report);
  node->site = text_attribute(construction, "site", report);
  node->set = static_cast<uint32_t>(number_attribute(construction, "process_set_id", report));
  node->op = static_cast<ReduceOp>(number_attribute(construction, "reduce_op", report));
  node->root = static_cast<int32_t>(number_attribute(construction, "root_rank", report));
  node->prescale = std::bit_cast<double>(number_attribute(construction, "prescale_bits", report));
  node->postscale = std::bit_cast<double>(number_attribute(construction, "postscale_bits", report));
  unsigned char wait = 0;
  tf.TF_OpKernelConstruction_GetAttrBool(construction, "wait", &wait, report);
  node->wait = wait != 0;
  if (!report.ok()) tf.TF_OpKernelConstruction_Failure(construction, report);
  return new Kernel{std::move(node)};
}

void destroy(void* kernel) { delete static_cast<Kernel*>(kernel); }

// Whether `done` is a std::function as this library knows it: its third and fourth word, manager
// and invoker, are code of TensorFlow's.
bool layout_is_known(const TF_AsyncOpKernelDoneCallback* done) {
  void* words[4];
  static_assert(sizeof words == sizeof(Done));
  std::memcpy(words, done, sizeof words);
  for (void* word : {words[2], words[3]}) {
    Dl_info info;
    if (word == nullptr || ::dladdr(word, &info) == 0 || info.dli_fname == nullptr ||
        std::strstr(info.dli_fname, "tensorflow") == nullptr) {
      return false;
    }
  }
  return true;
}

// The C API passes the address of a std::function that is destroyed when compute() returns: a call
// that ends later needs a copy, which takes the same std::function on both sides.
bool may_copy(const TF_AsyncOpKernelDoneCallback* done) {
  static const bool known = [done] {
    if (layout_is_known(done)) return true;
    door()->warn(
        "this TensorFlow was built with another C++ library than horovod: collectives in graphs "
        "block a thread of TensorFlow's pool each, which is slower, and more of them at once than "
        "the pool has threads can deadlock (tf.config.threading.set_inter_op_parallelism_threads)");
    return false;
  }();
  return known;
}

void compute(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  const auto& node = static_cast<Kernel*>(kernel)->node;
  if (node->wait) {
    fly(node, context, [done] { tf.TF_RunAsyncOpKernelDoneCallback(done); });
  } else if (may_copy(done)) {
    fly(node, context, *reinterpret_cast<const Done*>(done));
  } else {
    auto waiting = std::make_shared<Node>(*node);
    waiting->wait = true;
    fly(std::move(waiting), context, [done] { tf.TF_RunAsyncOpKernelDoneCallback(done); });
  }
}

// ---- Numbers of the world ---------------------------------------------------------------------

using Number = int32_t (*)(uint32_t set);

struct NumberRow {
  const char* name;
  Number number;
};

// The codes are those of Horovod 0.28's process_set_included.
constexpr int32_t kNotInitialized = -1, kUnknownSet = -3, kNotAMember = -4;

int32_t included(uint32_t set) {
  const Door::World world = door()->world();
  if (world.size == 0) return kNotInitialized;
  const auto members = door()->members(set);
  if (members.empty()) return kUnknownSet;
  for (const int32_t member : members) {
    if (member == world.rank) return 1;
  }
  return kNotAMember;
}

int32_t set_size(uint32_t set) { return static_cast<int32_t>(door()->members(set).size()); }

const NumberRow kNumbers[] = {
    {"HorovodRank", [](uint32_t) { return door()->world().rank; }},
    {"HorovodLocalRank", [](uint32_t) { return door()->world().local_rank; }},
    {"HorovodLocalSize", [](uint32_t) { return door()->world().local_size; }},
    {"HorovodSize", set_size},
    {"HorovodProcessSetIncluded", included},
};

struct NumberKernel {
  const NumberRow* row;
  uint32_t set;
};

template <const NumberRow* kRow>
void* create_number(TF_OpKernelConstruction* construction) {
  const Report report;
  const auto set = static_cast<uint32_t>(number_attribute(construction, "process_set_id", report));
  if (!report.ok()) tf.TF_OpKernelConstruction_Failure(construction, report);
  return new NumberKernel{kRow, set};
}

void destroy_number(void* kernel) { delete static_cast<NumberKernel*>(kernel); }

void compute_number(void* kernel, TF_OpKernelContext* context) {
  const auto& it = *static_cast<NumberKernel*>(kernel);
  Report report;
  constexpr int kInt32 = 3;
  if (door()->world().size == 0 && it.row->number != included) {
    report.set(kFailedPrecondition,
               std::string(it.row->name) + ": horovod is not initialized: call init() first");
    return tf.TF_OpKernelContext_Failure(context, report);
  }
  const int32_t value = it.row->number(it.set);
  if (value == 0 && it.row->number == set_size) {
    report.set(kInvalidArgument, std::string(it.row->name) + ": there is no process set " +
                                     std::to_string(it.set) + " (was it removed?)");
    return tf.TF_OpKernelContext_Failure(context, report);
  }
  const TensorRef output(
      tf.TF_AllocateOutput(context, 0, kInt32, nullptr, 0, sizeof value, report));
  if (!report.ok()) return tf.TF_OpKernelContext_Failure(context, report);
  std::memcpy(tf.TF_TensorData(output.get()), &value, sizeof value);
}

// ---- Registration -----------------------------------------------------------------------------

struct Definition {
  const char* name;
  std::vector<const char*> attributes, inputs, outputs;
  InferShapes shapes;
};

void define(const Definition& definition, const Report& report) {
  TF_OpDefinitionBuilder* builder = tf.TF_NewOpDefinitionBuilder(definition.name);
  for (const char* text : definition.attributes) tf.TF_OpDefinitionBuilderAddAttr(builder, text);
  for (const char* text : definition.inputs) tf.TF_OpDefinitionBuilderAddInput(builder, text);
  for (const char* text : definition.outputs) tf.TF_OpDefinitionBuilderAddOutput(builder, text);
  tf.TF_OpDefinitionBuilderSetIsStateful(builder, true);
  if (definition.shapes != nullptr) {
    tf.TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, definition.shapes);
  }
  tf.TF_RegisterOpDefinition(builder, report);
}

// Whatever device a tensor is on, TensorFlow brings it to the host for these kernels.
constexpr const char* kDevice = "CPU";

template <size_t kIndex>
void register_collective(const Report& report) {
  static constexpr const OpRow* kRow = &kCollectives[kIndex];
  Definition definition{kRow->name,
                        {"tensor_name: string", "site: string = ''", "process_set_id: int = 0",
                         "reduce_op: int = 1", "root_rank: int = -1", "wait: bool = false"},
                        kRow->inputs,
                        kRow->outputs,
                        kRow->shapes};
  const std::string one = kOne;
  const std::string prescale = "prescale_bits: int = " + one;
  const std::string postscale = "postscale_bits: int = " + one;
  definition.attributes.push_back(prescale.c_str());
  definition.attributes.push_back(postscale.c_str());
  if (kRow->inputs.size() > 0) {
    const bool grouped = std::strncmp(kRow->name, "HorovodGrouped", 14) == 0;
    definition.attributes.push_back(grouped ? kTypes : kType);
  }
  if (kRow->kind == OpKind::Alltoall) definition.attributes.push_back("S: {int32, int64}");
  define(definition, report);
  if (!report.ok()) return;
  tf.TF_RegisterKernelBuilder(
      kRow->name, tf.TF_NewAsyncKernelBuilder(kRow->name, kDevice, create<kRow>, compute, destroy),
      report);
}

template <size_t kIndex>
void register_number(const Report& report) {
  static constexpr const NumberRow* kRow = &kNumbers[kIndex];
  define({kRow->name, {"process_set_id: int = 0"}, {}, {"value: int32"}, scalar_shape}, report);
  if (!report.ok()) return;
  tf.TF_RegisterKernelBuilder(kRow->name,
                              tf.TF_NewKernelBuilder(kRow->name, kDevice, create_number<kRow>,
                                                     compute_number, destroy_number),
                              report);
}

template <size_t... kIndex>
std::vector<void (*)(const Report&)> collectives(std::index_sequence<kIndex...>) {
  return {register_collective<kIndex>...};
}
template <size_t... kIndex>
std::vector<void (*)(const Report&)> numbers(std::index_sequence<kIndex...>) {
  return {register_number<kIndex>...};
}

}  // namespace

std::string register_ops() {
  auto steps = collectives(std::make_index_sequence<std::size(kCollectives)>());
  for (const auto step : numbers(std::make_index_sequence<std::size(kNumbers)>())) {
    steps.push_back(step);
  }
  for (const auto step : steps) {
    const Report report;
    step(report);
    if (!report.ok()) return report.text();
  }
  return {};
}

}  // namespace horovod::tensorflow
