// XLA's interface for handlers of custom calls, declared by hand so that nothing is compiled
// against XLA or a framework that contains it. Must not know what a handler does.
//
// Layout: xla/ffi/api/c_api.h, version 0.2, which is the one in TensorFlow 2.21. Later versions of
// major 0 add to the end of structs, whose sizes say which they have; JAX 0.10 has 0.3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace horovod::xla {

inline constexpr int kMajor = 0, kLeastMinor = 2;

enum class ExtensionType : int { Metadata = 1 };

struct Extension {
  size_t struct_size;
  ExtensionType type;
  Extension* next;
};

struct Version {
  size_t struct_size;
  Extension* extensions;
  int major, minor;
};

struct Error;  // XLA's own
struct Context;
struct Future;

struct ErrorArguments {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  int code;  // absl's
};

struct Text {
  const char* data;
  size_t size;
  operator std::string_view() const { return {data, size}; }
};

enum class ElementType : int {
  Pred = 1,
  S8 = 2,
  S16 = 3,
  S32 = 4,
  S64 = 5,
  U8 = 6,
  U16 = 7,
  F16 = 10,
  F32 = 11,
  F64 = 12,
  C64 = 15,
  BF16 = 16,
  C128 = 18,
};

struct Buffer {
  size_t struct_size;
  Extension* extensions;
  ElementType type;
  void* data;
  int64_t rank;
  const int64_t* dims;
};

struct Buffers {  // operands or results
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  const int* kinds;
  Buffer* const* buffers;
};

struct Scalar {
  ElementType type;
  const void* value;
};

enum class AttributeType : int { Array = 1, Dictionary = 2, Scalar = 3, String = 4 };

struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  const AttributeType* types;
  const Text* const* names;
  const void* const* values;  // Scalar, Text, ..., by type
};

enum class Stage : int { Instantiate = 0, Prepare = 1, Initialize = 2, Execute = 3 };

struct Api;

struct Frame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  Context* context;
  Stage stage;
  Buffers operands, results;
  Attributes attributes;
  Future* future;  // of a handler that ends later
};

using Handler = Error*(Frame*);

struct Handlers {  // by stage; null: nothing to do
  Handler *instantiate, *prepare, *initialize, *execute;
};

struct RegisterArguments {
  size_t struct_size;
  Extension* extensions;
  Text name, platform;
  Handlers handlers;
  uint32_t traits;
};

// What a handler says of itself when it is asked instead of run. Older versions end earlier.
struct Metadata {
  size_t struct_size;
  Version version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Api {
  size_t struct_size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*create_error)(ErrorArguments*);
  void (*error_message)(void*);
  void (*destroy_error)(void*);
  Error* (*register_handler)(RegisterArguments*);
};

}  // namespace horovod::xla
