// One collective of a program that XLA compiled. Must not know which framework the program is from.

#include "xla_call.h"

#include <bit>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "native/failure.h"
#include "native/turns.h"

namespace horovod::xla {
namespace {

// Whether XLA asks what the handler is, which is then answered, instead of running it.
bool answer_query(const Frame& frame) {
  for (Extension* each = frame.extensions; each != nullptr; each = each->next) {
    if (each->type != ExtensionType::Metadata) continue;
    Metadata* metadata = reinterpret_cast<MetadataExtension*>(each)->metadata;
    metadata->version = {sizeof(Version), nullptr, frame.api->version.major,
                         frame.api->version.minor};
    metadata->traits = 0;
    return true;
  }
  return false;
}

Error* error_of(const Frame& frame, const Failure& failure) {
  ErrorArguments arguments{sizeof arguments, nullptr, failure.text().c_str(), failure.code()};
  return frame.api->create_error(&arguments);
}

const void* attribute(const Frame& frame, std::string_view name, AttributeType type) {
  const Attributes& all = frame.attributes;
  for (int64_t i = 0; i < all.size; ++i) {
    if (all.types[i] == type && *all.names[i] == name) return all.values[i];
  }
  throw horovod::Error(
      ErrorKind::InvalidArgument,
      "the compiled program is of another version: it lacks the attribute " + std::string(name));
}

std::string text(const Frame& frame, std::string_view name) {
  return std::string(*static_cast<const Text*>(attribute(frame, name, AttributeType::String)));
}

int64_t number(const Frame& frame, std::string_view name) {
  const auto* scalar = static_cast<const Scalar*>(attribute(frame, name, AttributeType::Scalar));
  int64_t value = 0;
  std::memcpy(&value, scalar->value, sizeof value);
  return value;
}

DType dtype_of(ElementType type) {
  switch (type) {
    case ElementType::Pred:
      return DType::Bool;
    case ElementType::S8:
      return DType::Int8;
    case ElementType::S16:
      return DType::Int16;
    case ElementType::S32:
      return DType::Int32;
    case ElementType::S64:
      return DType::Int64;
    case ElementType::U8:
      return DType::UInt8;
    case ElementType::U16:
      return DType::UInt16;
    case ElementType::F16:
      return DType::Float16;
    case ElementType::F32:
      return DType::Float32;
    case ElementType::F64:
      return DType::Float64;
    case ElementType::BF16:
      return DType::BFloat16;
    case ElementType::C64:
      return DType::Complex64;
    case ElementType::C128:
      return DType::Complex128;
  }
  throw horovod::Error(ErrorKind::InvalidArgument, "tensors of this data type are not supported");
}

Shape shape_of(const Buffer& buffer) { return {buffer.dims, buffer.dims + buffer.rank}; }

// An empty buffer may have no memory, and null has a meaning of its own in a call.
std::byte* memory_of(const Buffer& buffer) {
  static std::byte nothing;
  return buffer.data == nullptr ? &nothing : static_cast<std::byte*>(buffer.data);
}

// A call and where its results go.
class Call {
 public:
  explicit Call(const Frame& frame)
      : frame_(frame),
        operator_(text(frame, "operator")),
        site_(text(frame, "site")),
        call_(std::make_shared<LocalCall>()) {
    call_->kind = static_cast<OpKind>(number(frame, "kind"));
    call_->request.set = static_cast<uint32_t>(number(frame, "set"));
    call_->request.name = text(frame, "name");
  }

  Failure run(Door& door) {
    Failure failure = guarded([&] { return load(); });
    if (failure) {  // those that make the matching call must not wait for this one
      door.reject({call_->kind, call_->request.set, call_->request.name, failure.text()});
    } else {
      const BlockingTurn turn({call_->request.set, call_->request.name});
      const Status status = door.run(call_, site_);
      failure = failure_of(status, call_->done.load());
    }
    if (!failure) failure = misfit_;
    if (!failure) std::memset(memory_of(token()), 0, sizeof(int32_t));
    return failure ? Failure(failure.code(), operator_ + ": " + failure.text()) : failure;
  }

  template <typename Work>
  static Failure guarded(Work&& work) noexcept {
    try {
      return work();
    } catch (const horovod::Error& error) {
      return failure_of(error.status(), false);
    } catch (const std::bad_alloc&) {
      return {kResourceExhausted, "no memory for a call"};
    } catch (const std::exception& error) {
      return {kUnknown, error.what()};
    }
  }

 private:
  Failure load() {
    call_->op = static_cast<ReduceOp>(number(frame_, "op"));
    call_->root = static_cast<int32_t>(number(frame_, "root"));
    call_->prescale = std::bit_cast<double>(number(frame_, "prescale_bits"));
    call_->postscale = std::bit_cast<double>(number(frame_, "postscale_bits"));
    const bool allocates = info(call_->kind).own_rows || call_->kind == OpKind::Reducescatter;
    for (int64_t i = 0; i + 1 < frame_.operands.size; ++i) {
      const Buffer& operand = *frame_.operands.buffers[i];
      std::byte* out = allocates ? nullptr : memory_of(*frame_.results.buffers[i]);
      call_->tensors.push_back(
          {memory_of(operand), out, dtype_of(operand.type), shape_of(operand)});
    }
    if (allocates) {
      call_->allocate = [this](size_t i, const Shape& shape) { return output(i, shape); };
    }
    return {};
  }

  // The compiler was told the shape of each result. Should the ranks' tensors give another, then
  // the collective ends beside it, since other ranks are in the middle of it, and fails here.
  std::byte* output(size_t i, const Shape& shape) noexcept {
    const Buffer& result = *frame_.results.buffers[i];
    if (shape == shape_of(result)) return memory_of(result);
    const Failure failed = guarded([&]() -> Failure {
      misfit_ = {kFailedPrecondition,
                 "the result has shape " + to_string(shape) +
                     ", and the function was compiled for " + to_string(shape_of(result)) +
                     ": with jit_compile=True all ranks must have as many rows each, and a "
                     "function must be traced again for another number of ranks"};
      const uint64_t bytes = count_of(shape) * info(call_->tensors[i].dtype).size;
      beside_.push_back(std::make_unique<std::byte[]>(bytes + 1));
      return {};
    });
    return failed ? nullptr : beside_.back().get();
  }

  const Buffer& token() const { return *frame_.results.buffers[frame_.results.size - 1]; }

  const Frame& frame_;
  const std::string operator_, site_;
  const std::shared_ptr<LocalCall> call_;
  Failure misfit_;
  std::vector<std::unique_ptr<std::byte[]>> beside_;
};

}  // namespace

Error* run_collective(Frame* frame, Door* door) noexcept {
  if (answer_query(*frame) || frame->stage != Stage::Execute) return nullptr;
  const Failure failure = Call::guarded([&]() -> Failure {
    if (door == nullptr) return {kFailedPrecondition, "horovod is not initialized"};
    return Call(*frame).run(*door);
  });
  return failure ? error_of(*frame, failure) : nullptr;
}

}  // namespace horovod::xla
