// L6: what Python keeps for a call in flight, and what it gets back. Must not know how a call is
// negotiated, nor any framework.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings_dlpack.h"
#include "engine.h"

namespace horovod {

namespace nb = nanobind;

using NdArray = nb::ndarray<nb::array_api>;

// The error that ended a call, or kept the caller from waiting for it.
struct CallError {
  Status status;
  std::string name;  // of the call, in full
};

// In UTF-8, which lives as long as the object; nothing for what is no text or has no such form, as
// lone surrogates. Of text of a derived type the text that it holds, whatever its str() makes of
// it.
inline std::optional<std::string_view> text_of(nb::handle object) {
  Py_ssize_t size = 0;
  const char* text =
      PyUnicode_Check(object.ptr()) ? PyUnicode_AsUTF8AndSize(object.ptr(), &size) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  return std::string_view(text, static_cast<size_t>(size));
}

inline NdArray to_array(const Output& output) {
  nb::capsule owner(new std::shared_ptr<std::byte>(output.data),
                    [](void* p) noexcept { delete static_cast<std::shared_ptr<std::byte>*>(p); });
  std::vector<size_t> shape(output.shape.begin(), output.shape.end());
  return NdArray(output.data.get(), shape.size(), shape.data(), owner, nullptr,
                 dlpack_of(output.dtype), nb::device::cpu::value);
}

// A finished call; what a caller doesn't ask for costs nothing.
class Result {
 public:
  explicit Result(LocalCallPtr call) : call_(std::move(call)) {}
  int kind() const { return static_cast<int>(call_->status.kind); }
  const std::string& text() const { return call_->status.text; }
  int32_t rank() const { return call_->status.rank; }
  int64_t value() const { return call_->value; }

  // That the core allocated, for the tensor at this place in the call.
  NdArray output(size_t place) const {
    std::optional<NdArray> found;
    each([&](const Tensor&, const Output* output) {
      if (place-- == 0 && output) found = to_array(*output);
    });
    if (!found) throw Error(ErrorKind::InvalidArgument, "the core allocated no such output");
    return std::move(*found);
  }
  std::vector<std::optional<NdArray>> outputs() const {
    std::vector<std::optional<NdArray>> outputs;
    each([&](const Tensor&, const Output* output) {
      outputs.push_back(output ? std::optional(to_array(*output)) : std::nullopt);
    });
    return outputs;
  }
  std::vector<Shape> shapes() const {
    std::vector<Shape> shapes;
    each([&](const Tensor& t, const Output* output) {
      shapes.push_back(output ? output->shape : t.shape);
    });
    return shapes;
  }
  std::optional<std::vector<int64_t>> splits() const {
    if (!call_->status.ok() || call_->kind != OpKind::Alltoall) return std::nullopt;
    return call_->received_splits;
  }

 private:
  // With the output that the core allocated, null where it is the caller's own.
  template <typename Visit>
  void each(Visit&& visit) const {
    if (!call_->status.ok()) return;
    size_t allocated = 0;
    for (const Tensor& t : call_->tensors) {
      visit(t, t.out == nullptr ? &call_->outputs.at(allocated++) : nullptr);
    }
  }

  LocalCallPtr call_;
};

// A call in flight.
struct PyCall {
  LocalCallPtr call;
  nb::object keep;     // what owns the memory of its tensors
  nb::object outputs;  // where results are written: a tensor or a tuple of them; null: elsewhere
  nb::object finish;   // makes the user's result of `outputs`, else of a Result; may be None

  // The user's result, of a call that has succeeded.
  nb::object outcome() && {
    nb::object result = outputs.is_valid() ? std::move(outputs) : nb::cast(Result(std::move(call)));
    return finish.is_valid() && !finish.is_none() ? finish(result) : result;
  }
};

// How the tensors of a call are read, and its result is made; an adapter has a few of them.
class Form {
 public:
  // Tensors of exactly these types can be read. For the functions `hidden` and `memory` they say
  // whether their values are others than lie in memory, and what owns that. Results replace the
  // inputs, or lie in what `allocate` makes of each, or, without that, where the core allocates.
  // `one` and `group` make of these outputs, a tensor or a tuple of them, or of a Result, what the
  // user gets; None: it is the outputs themselves.
  Form(nb::iterable types, nb::object hidden, nb::object memory, bool in_place, nb::object allocate,
       nb::object one, nb::object group)
      : hidden_(std::move(hidden)),
        memory_(std::move(memory)),
        in_place_(in_place),
        allocate_(std::move(allocate)),
        one_(std::move(one)),
        group_(std::move(group)) {
    for (nb::handle type : types) {
      if (const ExchangeApi* api = exchange_api(type)) types_.emplace_back(nb::borrow(type), api);
    }
  }

  // Reads a tensor, or a list of them for a grouped call; false if there is none or one can't be
  // read.
  bool read(bool grouped, nb::handle tensors, std::vector<Tensor>& views, PyCall& call) const {
    if (!grouped) {
      views.resize(1);
      call.finish = one_;
      return read(tensors, views[0], call.keep, call.outputs);
    }
    if (!PyList_Check(tensors.ptr())) return false;
    // A copy: another thread may change the list while `allocate` has let go of the GIL.
    const auto items = nb::steal<nb::tuple>(PyList_AsTuple(tensors.ptr()));
    if (!items.is_valid()) throw nb::python_error();
    const size_t count = items.size();
    nb::list kept, outputs;
    views.resize(count);
    for (size_t i = 0; i < count; ++i) {
      nb::object keep, output;
      if (!read(items[i], views[i], keep, output)) return false;
      kept.append(std::move(keep));
      if (output.is_valid()) outputs.append(std::move(output));
    }
    call.keep = kept;
    call.finish = group_;
    if (in_place_ || !allocate_.is_none()) call.outputs = nb::tuple(outputs);
    return count > 0;
  }

 private:
  const ExchangeApi* api_of(nb::handle object) const {
    for (const auto& [type, api] : types_) {
      if (type.ptr() == reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()))) return api;
    }
    return nullptr;
  }

  bool read(nb::handle tensor, Tensor& view, nb::object& keep, nb::object& output) const {
    const ExchangeApi* api = api_of(tensor);
    if (api == nullptr || !host_tensor(*api, tensor, view)) return false;
    if (!hidden_(tensor).is(nb::handle(Py_False))) return false;
    keep = memory_(tensor);
    if (in_place_) {
      view.out = view.in;
      output = nb::borrow(tensor);
    } else if (!allocate_.is_none()) {
      output = allocate_(tensor);
      Tensor made;
      api = api_of(output);  // a mode of the framework's may make anything
      if (api == nullptr || !host_tensor(*api, output, made)) return false;
      if (made.shape != view.shape || made.dtype != view.dtype) return false;
      view.out = made.in;
    }
    return true;
  }

  std::vector<std::pair<nb::object, const ExchangeApi*>> types_;
  nb::object hidden_, memory_;
  bool in_place_;
  nb::object allocate_, one_, group_;
};

}  // namespace horovod
