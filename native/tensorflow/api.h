// TensorFlow's C API for operators and kernels, declared by hand and found at run time, so that
// nothing is compiled against TensorFlow. Must not know any operator.
//
// Signatures: tensorflow/c/{ops,kernels,tf_tensor,tf_status}.h of TensorFlow 2.16 to 2.21.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "native/failure.h"

namespace horovod::tensorflow {

struct TF_Status;
struct TF_Tensor;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_ShapeHandle;
struct TF_KernelBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_AsyncOpKernelDoneCallback;

using CreateKernel = void* (*)(TF_OpKernelConstruction*);
using Compute = void (*)(void*, TF_OpKernelContext*);
using ComputeAsync = void (*)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*);
using DeleteKernel = void (*)(void*);
using InferShapes = void (*)(TF_ShapeInferenceContext*, TF_Status*);

// clang-format off
#define HOROVOD_TF_API(X) \
  X(TF_Status*, TF_NewStatus, ()) \
  X(void, TF_DeleteStatus, (TF_Status*)) \
  X(int, TF_GetCode, (const TF_Status*)) \
  X(const char*, TF_Message, (const TF_Status*)) \
  X(void, TF_SetStatus, (TF_Status*, int, const char*)) \
  X(TF_OpDefinitionBuilder*, TF_NewOpDefinitionBuilder, (const char*)) \
  X(void, TF_OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder*, const char*)) \
  X(void, TF_OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder*, const char*)) \
  X(void, TF_OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder*, const char*)) \
  X(void, TF_OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder*, bool)) \
  X(void, TF_OpDefinitionBuilderSetShapeInferenceFunction, (TF_OpDefinitionBuilder*, InferShapes)) \
  X(void, TF_RegisterOpDefinition, (TF_OpDefinitionBuilder*, TF_Status*)) \
  X(TF_ShapeHandle*, TF_NewShapeHandle, ()) \
  X(void, TF_DeleteShapeHandle, (TF_ShapeHandle*)) \
  X(int64_t, TF_ShapeInferenceContextNumInputs, (TF_ShapeInferenceContext*)) \
  X(void, TF_ShapeInferenceContextGetInput, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*)) \
  X(void, TF_ShapeInferenceContextSetOutput, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*)) \
  X(TF_ShapeHandle*, TF_ShapeInferenceContextScalar, (TF_ShapeInferenceContext*)) \
  X(TF_ShapeHandle*, TF_ShapeInferenceContextVectorFromSize, (TF_ShapeInferenceContext*, size_t)) \
  X(int, TF_ShapeInferenceContextRankKnown, (TF_ShapeInferenceContext*, TF_ShapeHandle*)) \
  X(void, TF_ShapeInferenceContextWithRankAtLeast, (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, TF_ShapeHandle*, TF_Status*)) \
  X(void, TF_ShapeInferenceContextSubshape, (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, int64_t, TF_ShapeHandle*, TF_Status*)) \
  X(void, TF_ShapeInferenceContextConcatenateShapes, (TF_ShapeInferenceContext*, TF_ShapeHandle*, TF_ShapeHandle*, TF_ShapeHandle*, TF_Status*)) \
  X(void, TF_ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext*, TF_Status*)) \
  X(TF_KernelBuilder*, TF_NewKernelBuilder, (const char*, const char*, CreateKernel, Compute, DeleteKernel)) \
  X(TF_KernelBuilder*, TF_NewAsyncKernelBuilder, (const char*, const char*, CreateKernel, ComputeAsync, DeleteKernel)) \
  X(void, TF_RegisterKernelBuilder, (const char*, TF_KernelBuilder*, TF_Status*)) \
  X(void, TF_OpKernelConstruction_Failure, (TF_OpKernelConstruction*, TF_Status*)) \
  X(void, TF_OpKernelConstruction_GetAttrSize, (TF_OpKernelConstruction*, const char*, int32_t*, int32_t*, TF_Status*)) \
  X(void, TF_OpKernelConstruction_GetAttrString, (TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*)) \
  X(void, TF_OpKernelConstruction_GetAttrInt64, (TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*)) \
  X(void, TF_OpKernelConstruction_GetAttrBool, (TF_OpKernelConstruction*, const char*, unsigned char*, TF_Status*)) \
  X(void, TF_RunAsyncOpKernelDoneCallback, (TF_AsyncOpKernelDoneCallback*)) \
  X(void, TF_OpKernelContext_Failure, (TF_OpKernelContext*, TF_Status*)) \
  X(int64_t, TF_StepId, (TF_OpKernelContext*)) \
  X(int64_t, TF_GetIterId, (TF_OpKernelContext*)) \
  X(int, TF_NumInputs, (TF_OpKernelContext*)) \
  X(void, TF_GetInput, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*)) \
  X(TF_Tensor*, TF_AllocateOutput, (TF_OpKernelContext*, int, int, const int64_t*, int, size_t, TF_Status*)) \
  X(TF_Tensor*, TF_ForwardInputOrAllocateOutput, (TF_OpKernelContext*, const int*, int, int, const int64_t*, int, int*, TF_Status*)) \
  X(void, TF_DeleteTensor, (TF_Tensor*)) \
  X(int, TF_TensorType, (const TF_Tensor*)) \
  X(int, TF_NumDims, (const TF_Tensor*)) \
  X(int64_t, TF_Dim, (const TF_Tensor*, int)) \
  X(void*, TF_TensorData, (const TF_Tensor*))
// clang-format on

struct Api {
#define HOROVOD_TF_DECLARE(result, name, arguments) result(*name) arguments = nullptr;
  HOROVOD_TF_API(HOROVOD_TF_DECLARE)
#undef HOROVOD_TF_DECLARE
};

// Filled in when the library is loaded, before anything below can run.
extern Api tf;

// Finds the functions in the TensorFlow of this process; the names of those that are missing.
std::string load_api();

// A TF_Status that lives as long as this.
class Report {
 public:
  Report() : status_(tf.TF_NewStatus()) {}
  ~Report() { tf.TF_DeleteStatus(status_); }
  Report(const Report&) = delete;

  operator TF_Status*() const { return status_; }
  bool ok() const { return tf.TF_GetCode(status_) == kOk; }
  std::string text() const { return tf.TF_Message(status_); }
  void set(int code, const std::string& text) { tf.TF_SetStatus(status_, code, text.c_str()); }

 private:
  TF_Status* status_;
};

// A reference to a tensor's buffer.
class TensorRef {
 public:
  TensorRef() = default;
  explicit TensorRef(TF_Tensor* tensor) : tensor_(tensor) {}
  ~TensorRef() { reset(); }
  TensorRef(TensorRef&& other) noexcept : tensor_(other.tensor_) { other.tensor_ = nullptr; }
  TensorRef& operator=(TensorRef&& other) noexcept {
    if (this != &other) {
      reset();
      tensor_ = other.tensor_;
      other.tensor_ = nullptr;
    }
    return *this;
  }

  TF_Tensor* get() const { return tensor_; }
  explicit operator bool() const { return tensor_ != nullptr; }
  void reset() {
    if (tensor_ != nullptr) tf.TF_DeleteTensor(tensor_);
    tensor_ = nullptr;
  }

 private:
  TF_Tensor* tensor_ = nullptr;
};

}  // namespace horovod::tensorflow
