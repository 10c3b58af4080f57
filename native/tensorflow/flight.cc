// One collective on its way. Must not know how operators are registered.

#include "flight.h"

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <utility>

#include "native/failure.h"
#include "native/turns.h"

namespace horovod::tensorflow {
namespace {

std::atomic<Door*> the_door{nullptr};

// By TF_DataType; -1 for what the engine doesn't move.
constexpr std::array<int, 20> kTypes = [] {
  std::array<int, 20> types{};
  types.fill(-1);
  types[1] = static_cast<int>(DType::Float32);
  types[2] = static_cast<int>(DType::Float64);
  types[3] = static_cast<int>(DType::Int32);
  types[4] = static_cast<int>(DType::UInt8);
  types[5] = static_cast<int>(DType::Int16);
  types[6] = static_cast<int>(DType::Int8);
  types[8] = static_cast<int>(DType::Complex64);
  types[9] = static_cast<int>(DType::Int64);
  types[10] = static_cast<int>(DType::Bool);
  types[14] = static_cast<int>(DType::BFloat16);
  types[17] = static_cast<int>(DType::UInt16);
  types[18] = static_cast<int>(DType::Complex128);
  types[19] = static_cast<int>(DType::Float16);
  return types;
}();

constexpr int kFloat32 = 1, kInt32 = 3, kInt64 = 9;
static_assert(kTypes[kFloat32] == static_cast<int>(DType::Float32));

Shape shape_of(const TF_Tensor* tensor) {
  Shape shape(static_cast<size_t>(tf.TF_NumDims(tensor)));
  for (size_t d = 0; d < shape.size(); ++d) shape[d] = tf.TF_Dim(tensor, static_cast<int>(d));
  return shape;
}

// An empty tensor may have no memory, and null has a meaning of its own in a call.
std::byte* memory_of(const TF_Tensor* tensor) {
  static std::byte nothing;
  void* data = tf.TF_TensorData(tensor);
  return data == nullptr ? &nothing : static_cast<std::byte*>(data);
}

// Owns itself: ends with end().
class Flight final : Successor {
 public:
  Flight(std::shared_ptr<const Node> node, TF_OpKernelContext* context, Done done)
      : node_(std::move(node)),
        context_(context),
        done_(std::move(done)),
        call_(std::make_shared<LocalCall>()) {}

  void run() {
    Failure failure = load();
    if (failure) return refuse(failure);
    const bool wait = node_->wait;  // once another thread may start this flight it may be gone
    switch (turns().take(key(), this, tf.TF_StepId(context_))) {
      case Turn::Twice:
        return refuse({kInvalidArgument, "the name \"" + call_->request.name +
                                             "\" is used twice in one step, and the order of the "
                                             "two is TensorFlow's own: give them two names"});
      case Turn::Later:
        if (!wait) return;
        await_turn();
        break;
      case Turn::Now:
        break;
    }
    if (wait) {
      const Status status = door()->run(call_, node_->site);
      land(failure_of(status, call_->done.load()));
    } else {
      go();
    }
  }

  // The flight before this one, of the same name, has landed.
  void give_turn() override {
    if (!node_->wait) return go();
    const std::lock_guard lock(turn_mutex_);
    has_turn_ = true;
    turn_.notify_one();
  }

 private:
  Turns::Key key() const { return {node_->set, call_->request.name}; }

  Failure load() {
    LocalCall& call = *call_;
    call.kind = node_->kind;
    call.op = node_->op;
    call.root = node_->root;
    call.prescale = node_->prescale;
    call.postscale = node_->postscale;
    call.request.set = node_->set;
    call.request.name = node_->name;
    if (const int64_t iteration = tf.TF_GetIterId(context_); iteration > 0) {
      call.request.name += "/" + std::to_string(iteration);
    }
    const bool allocates = info(node_->kind).own_rows || node_->kind == OpKind::Reducescatter;
    const int inputs = tf.TF_NumInputs(context_);
    const int tensors = node_->kind == OpKind::Alltoall ? 1 : inputs;
    outputs_.resize(static_cast<size_t>(tensors));
    Report report;
    for (int i = 0; i < tensors; ++i) {
      if (Failure failure = load_tensor(i, allocates, report)) return failure;
    }
    if (tensors < inputs) {
      if (Failure failure = load_splits(report)) return failure;
    }
    if (allocates) {
      call.allocate = [this](size_t i, const Shape& shape) {
        return allocate(static_cast<int>(i), shape);
      };
    }
    return {};
  }

  Failure load_tensor(int i, bool allocates, const Report& report) {
    TensorRef input = this->input(i, report);
    if (!input) return {kUnknown, report.text()};
    const int type = tf.TF_TensorType(input.get());
    const int dtype = type < static_cast<int>(kTypes.size()) ? kTypes[type] : -1;
    if (dtype < 0) return {kInvalidArgument, "tensors of this data type are not supported"};
    Tensor tensor{.in = nullptr, .out = nullptr, .dtype = static_cast<DType>(dtype), .shape = {}};
    tensor.shape = shape_of(input.get());
    if (!allocates) {
      // The buffer is handed on if this is its only use, so there may be no reference here.
      input.reset();
      int forwarded = -1;
      TensorRef output(tf.TF_ForwardInputOrAllocateOutput(context_, &i, 1, i, tensor.shape.data(),
                                                          static_cast<int>(tensor.shape.size()),
                                                          &forwarded, report));
      if (!report.ok() || !output) return {kResourceExhausted, report.text()};
      tensor.out = tensor.in = memory_of(output.get());
      outputs_[static_cast<size_t>(i)] = std::move(output);
      if (forwarded < 0) {
        input = this->input(i, report);
        if (!input) return {kUnknown, report.text()};
      }
    }
    if (input) tensor.in = memory_of(input.get());
    inputs_.push_back(std::move(input));
    call_->tensors.push_back(std::move(tensor));
    return {};
  }

  TensorRef input(int i, const Report& report) {
    TF_Tensor* tensor = nullptr;
    tf.TF_GetInput(context_, i, &tensor, report);
    return TensorRef(report.ok() ? tensor : nullptr);
  }

  // The input after the tensor; empty for equal parts.
  Failure load_splits(const Report& report) {
    const TensorRef splits = input(1, report);
    if (!splits) return {kUnknown, report.text()};
    const int type = tf.TF_TensorType(splits.get());
    const Shape shape = shape_of(splits.get());
    if ((type != kInt32 && type != kInt64) || shape.size() != 1) {
      return {kInvalidArgument, "splits must be a vector of int32 or int64"};
    }
    call_->has_splits = shape[0] > 0;
    const void* data = memory_of(splits.get());
    for (int64_t i = 0; i < shape[0]; ++i) {
      call_->splits.push_back(type == kInt32 ? static_cast<const int32_t*>(data)[i]
                                             : static_cast<const int64_t*>(data)[i]);
    }
    return {};
  }

  // Called by the driver of the engine: a kernel's context may be used by any thread until `done`.
  std::byte* allocate(int i, const Shape& shape) {
    const DTypeInfo& dtype = info(call_->tensors[static_cast<size_t>(i)].dtype);
    const int type =
        tf.TF_TensorType(inputs_[static_cast<size_t>(i)].get());  // as the operator declares
    return allocate(i, type, shape, count_of(shape) * dtype.size);
  }

  std::byte* allocate(int i, int type, const Shape& shape, uint64_t bytes) {
    Report report;
    TensorRef output(tf.TF_AllocateOutput(context_, i, type, shape.data(),
                                          static_cast<int>(shape.size()), bytes, report));
    if (!report.ok() || !output) return nullptr;
    std::byte* memory = memory_of(output.get());
    if (static_cast<size_t>(i) >= outputs_.size()) outputs_.resize(static_cast<size_t>(i) + 1);
    outputs_[static_cast<size_t>(i)] = std::move(output);
    return memory;
  }

  void go() {
    call_->when_done = [this](LocalCall& call) { land(failure_of(call.status, true)); };
    const auto node = node_;
    const auto call = call_;  // the flight may have landed before submit() returns
    const Status status = door()->submit(call, node->site);
    if (!status.ok()) land(failure_of(status, false));
  }

  void await_turn() {
    std::unique_lock lock(turn_mutex_);
    turn_.wait(lock, [this] { return has_turn_; });
  }

  void land(Failure failure) {
    if (!failure) failure = answer();
    Successor* next = turns().pass_on(key());
    end(failure);
    if (next != nullptr) next->give_turn();
  }

  // What the operation gives besides tensors.
  Failure answer() {
    if (node_->kind == OpKind::Join) {
      std::byte* memory = allocate(0, kInt32, {}, sizeof(int32_t));
      if (memory == nullptr) return {kResourceExhausted, "no memory for the result"};
      const auto value = static_cast<int32_t>(call_->value);
      std::memcpy(memory, &value, sizeof value);
    } else if (node_->kind == OpKind::Alltoall) {
      const auto n = static_cast<int64_t>(call_->received_splits.size());
      std::byte* memory = allocate(1, kInt32, {n}, static_cast<uint64_t>(n) * sizeof(int32_t));
      if (memory == nullptr) return {kResourceExhausted, "no memory for the result"};
      for (int64_t i = 0; i < n; ++i) {
        const auto rows = static_cast<int32_t>(call_->received_splits[static_cast<size_t>(i)]);
        std::memcpy(memory + i * static_cast<int64_t>(sizeof rows), &rows, sizeof rows);
      }
    }
    return {};
  }

  // The call never reached the engine: those that make the matching one must not wait for it.
  void refuse(const Failure& failure) {
    door()->reject({node_->kind, node_->set, call_->request.name, failure.text()});
    end(failure);
  }

  void end(const Failure& failure) {
    if (failure) {
      Report report;
      report.set(failure.code(), std::string(node_->type) + ": " + failure.text());
      tf.TF_OpKernelContext_Failure(context_, report);
    }
    const Done done = std::move(done_);
    delete this;  // all references to buffers are gone before anybody goes on
    done();
  }

  const std::shared_ptr<const Node> node_;  // TensorFlow may delete the kernel meanwhile
  TF_OpKernelContext* const context_;
  Done done_;
  std::vector<TensorRef> inputs_, outputs_;
  std::shared_ptr<LocalCall> call_;

  std::mutex turn_mutex_;
  std::condition_variable turn_;
  bool has_turn_ = false;
};

}  // namespace

Door* door() { return the_door.load(std::memory_order_acquire); }
void set_door(Door* door) { the_door.store(door, std::memory_order_release); }

void fly(std::shared_ptr<const Node> node, TF_OpKernelContext* context, Done done) {
  (new Flight(std::move(node), context, std::move(done)))->run();
}

}  // namespace horovod::tensorflow
