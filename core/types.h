// L0: data types, operations, errors and views, the words everything above speaks. Must not know
// any transport, thread or framework.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace horovod {

// -------------------------------------------------------------------------------------------------
// Data types. The numbers are those of Horovod 0.28's runtime type ids (0-9), extended.

enum class DType : uint8_t {
  UInt8 = 0,
  Int8 = 1,
  UInt16 = 2,
  Int16 = 3,
  Int32 = 4,
  Int64 = 5,
  Float16 = 6,
  Float32 = 7,
  Float64 = 8,
  Bool = 9,
  BFloat16 = 10,
  Complex64 = 11,
  Complex128 = 12,
};

enum class DTypeClass : uint8_t { Integer, Float, Bool, Complex };

struct DTypeInfo {
  std::string_view name;
  uint8_t size;  // bytes of one element; divides kAlignment
  DTypeClass kind;
};

inline constexpr std::array<DTypeInfo, 13> kDTypes{{
    {"uint8", 1, DTypeClass::Integer},
    {"int8", 1, DTypeClass::Integer},
    {"uint16", 2, DTypeClass::Integer},
    {"int16", 2, DTypeClass::Integer},
    {"int32", 4, DTypeClass::Integer},
    {"int64", 8, DTypeClass::Integer},
    {"float16", 2, DTypeClass::Float},
    {"float32", 4, DTypeClass::Float},
    {"float64", 8, DTypeClass::Float},
    {"bool", 1, DTypeClass::Bool},
    {"bfloat16", 2, DTypeClass::Float},
    {"complex64", 8, DTypeClass::Complex},
    {"complex128", 16, DTypeClass::Complex},
}};

constexpr const DTypeInfo& info(DType dtype) { return kDTypes[static_cast<size_t>(dtype)]; }

// -------------------------------------------------------------------------------------------------
// Reductions. The numbers are those that programs see as hvd.Average and so on.

enum class ReduceOp : uint8_t { Average = 0, Sum = 1, Adasum = 2, Min = 3, Max = 4, Product = 5 };

inline constexpr std::array<std::string_view, 6> kReduceOps{"Average", "Sum", "Adasum",
                                                            "Min",     "Max", "Product"};

constexpr std::string_view name_of(ReduceOp op) { return kReduceOps[static_cast<size_t>(op)]; }

// Whether `op` has a meaning for `dtype`. Sum and Product of bool are "or" and "and"; complex
// numbers have no order.
constexpr bool reduces(ReduceOp op, DType dtype) {
  switch (info(dtype).kind) {
    case DTypeClass::Float:
      return true;
    case DTypeClass::Integer:
      return op != ReduceOp::Adasum;
    case DTypeClass::Bool:
      return op != ReduceOp::Adasum && op != ReduceOp::Average;
    case DTypeClass::Complex:
      return op == ReduceOp::Sum || op == ReduceOp::Average || op == ReduceOp::Product;
  }
  return false;
}

// -------------------------------------------------------------------------------------------------
// Operations.

enum class OpKind : uint8_t {
  Allreduce = 0,
  Allgather = 1,
  Broadcast = 2,
  Alltoall = 3,
  Reducescatter = 4,
  Barrier = 5,
  Join = 6,
  AddSet = 7,
  RemoveSet = 8,
  Shutdown = 9,
};

struct OpInfo {
  std::string_view name;
  bool fuses = false;    // several calls may travel in one entry
  bool reduces = false;  // reduce op and scale factors are part of the agreement
  bool rooted = false;   // a root rank is part of the agreement
  // Dim 0 is each rank's own business and not part of the agreement; a 0-d tensor has none.
  bool own_rows = false;
  bool needs_rows = false;  // a 0-d tensor is refused
  bool joinable = false;    // ranks that joined are left out instead of making it an error
  bool moves_data = false;
};

inline constexpr std::array<OpInfo, 10> kOps{{
    {.name = "allreduce", .fuses = true, .reduces = true, .joinable = true, .moves_data = true},
    {.name = "allgather", .own_rows = true, .needs_rows = true, .moves_data = true},
    {.name = "broadcast", .rooted = true, .moves_data = true},
    {.name = "alltoall", .own_rows = true, .needs_rows = true, .moves_data = true},
    {.name = "reducescatter", .reduces = true, .needs_rows = true, .moves_data = true},
    {.name = "barrier", .joinable = true},
    {.name = "join", .joinable = true},
    {.name = "add_process_set", .joinable = true},
    {.name = "remove_process_set", .joinable = true},
    {.name = "shutdown", .joinable = true},
}};

constexpr const OpInfo& info(OpKind kind) { return kOps[static_cast<size_t>(kind)]; }

// -------------------------------------------------------------------------------------------------
// Errors. Library code throws Error on the thread that made a wrong call; everything that concerns
// other ranks travels as a Status inside entries and results.

enum class ErrorKind : uint8_t {
  None = 0,
  InvalidArgument = 1,  // this rank's call is wrong
  Mismatch = 2,         // ranks disagree; the engine stays usable
  PeerLost = 3,         // a peer died, froze or left
  Timeout = 4,          // a stall or the deadlock pattern, ended because a limit said so
  Shutdown = 5,         // the engine is not running
  Unavailable = 6,      // a library can't be loaded
  Resource = 7,         // memory, descriptors or threads were refused
};

inline constexpr size_t kErrorKinds = 8;

struct Status {
  ErrorKind kind = ErrorKind::None;
  std::string text;
  int32_t rank = -1;  // whom it is about, where that is one rank

  bool ok() const { return kind == ErrorKind::None; }
  bool operator==(const Status&) const = default;
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text, int32_t rank = -1)
      : std::runtime_error(text), status_{kind, text, rank} {}
  explicit Error(Status status) : std::runtime_error(status.text), status_(std::move(status)) {}
  const Status& status() const { return status_; }

 private:
  Status status_;
};

// -------------------------------------------------------------------------------------------------
// Memory.

// Every view starts on a boundary of this many bytes in the virtual vector that a schedule speaks
// of and in transport slots: no cache line mixes two views, and no element is ever split.
inline constexpr uint64_t kAlignment = 64;

constexpr uint64_t align_up(uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// A row-major stretch of one tensor in user memory.
struct View {
  std::byte* data = nullptr;
  uint64_t bytes = 0;
  DType dtype = DType::UInt8;
};

using Shape = std::vector<int64_t>;

// Elements of a shape; the sizes of shapes that reach this are checked to fit 63 bits.
inline uint64_t count_of(const Shape& shape) {
  uint64_t count = 1;
  for (int64_t d : shape) count *= static_cast<uint64_t>(d);
  return count;
}

std::string inline to_string(const Shape& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

}  // namespace horovod
