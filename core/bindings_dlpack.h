// L6: reads a framework's tensors without any of its headers, through DLPack's C exchange API. Must
// not know what is done with them.
//
// A type that offers the API has an attribute with a table of functions, of which one says where a
// tensor lies and how: https://dmlc.github.io/dlpack/latest/python_spec.html, DLPack 1.3.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>

#include "collective.h"

namespace horovod {

inline nanobind::dlpack::dtype dlpack_of(DType dtype) {
  using Code = nanobind::dlpack::dtype_code;
  const DTypeInfo& d = info(dtype);
  const bool is_signed = dtype == DType::Int8 || dtype == DType::Int16 || dtype == DType::Int32 ||
                         dtype == DType::Int64;
  Code code = Code::Float;
  switch (d.kind) {
    case DTypeClass::Integer:
      code = is_signed ? Code::Int : Code::UInt;
      break;
    case DTypeClass::Float:
      code = dtype == DType::BFloat16 ? Code::Bfloat : Code::Float;
      break;
    case DTypeClass::Bool:
      code = Code::Bool;
      break;
    case DTypeClass::Complex:
      code = Code::Complex;
      break;
  }
  return {static_cast<uint8_t>(code), static_cast<uint8_t>(d.size * 8), 1};
}

// The table's beginning; what follows `describe` isn't used.
struct ExchangeApi {
  uint32_t major, minor;
  ExchangeApi* previous;
  void* allocate;
  void* export_managed;
  void* import_managed;
  int (*describe)(void* tensor, nanobind::dlpack::dltensor* out);  // may be null
};

// What a type offers; null if nothing that can be used.
inline const ExchangeApi* exchange_api(nanobind::handle type) {
  PyObject* attribute = PyObject_GetAttrString(type.ptr(), "__dlpack_c_exchange_api__");
  if (attribute == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const auto capsule = nanobind::steal(attribute);  // the type keeps it too
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* api =
      static_cast<ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  return api->major == 1 && api->describe != nullptr ? api : nullptr;
}

inline bool row_major(const nanobind::dlpack::dltensor& t) {
  if (t.strides == nullptr) return true;
  int64_t step = 1;
  bool matches = true;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] == 0) return true;
    matches = matches && (t.shape[i] == 1 || t.strides[i] == step);
    step *= t.shape[i];
  }
  return matches;
}

inline std::optional<DType> dtype_of(nanobind::dlpack::dtype type) {
  for (size_t i = 0; i < kDTypes.size(); ++i) {
    const auto dtype = static_cast<DType>(i);
    if (dlpack_of(dtype) == type) return dtype;
  }
  return std::nullopt;
}

// Reads a tensor that lies in this host's memory in row-major order, as one without output. False
// for any other, and for complex numbers, which may be conjugates of what lies there.
inline bool host_tensor(const ExchangeApi& api, nanobind::handle object, Tensor& out) {
  nanobind::dlpack::dltensor t;
  if (api.describe(object.ptr(), &t) != 0) {
    PyErr_Clear();  // a tensor without memory or of a type that DLPack doesn't know
    return false;
  }
  if (t.device.device_type != nanobind::device::cpu::value || !row_major(t)) return false;
  const auto dtype = dtype_of(t.dtype);
  if (!dtype || info(*dtype).kind == DTypeClass::Complex) return false;
  out.in = static_cast<std::byte*>(t.data) + t.byte_offset;
  out.dtype = *dtype;
  out.shape.assign(t.shape, t.shape + t.ndim);
  return true;
}

}  // namespace horovod
