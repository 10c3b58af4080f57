// L6: the Python module horovod._core. Must not decide anything: it converts, releases the GIL and
// translates errors.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <unordered_map>

#include "bindings_calls.h"
#include "bindings_dlpack.h"
#include "door.h"
#include "engine.h"
#include "kernels.h"
#include "limit.h"
#include "shm.h"
#include "stores.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace horovod {
namespace {

using Address = uint64_t;

std::byte* pointer(Address a) { return reinterpret_cast<std::byte*>(a); }

Duration seconds(double s) {
  // Far beyond any deadline, and still representable.
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(std::min(s, 1e9)));
}

template <typename Enum>
Enum checked_enum(int value, size_t count, const char* what) {
  if (value < 0 || static_cast<size_t>(value) >= count) {
    throw Error(ErrorKind::InvalidArgument,
                "no " + std::string(what) + " " + std::to_string(value));
  }
  return static_cast<Enum>(value);
}

DType dtype_of(int code) { return checked_enum<DType>(code, kDTypes.size(), "dtype"); }
ReduceOp op_of(int code) { return checked_enum<ReduceOp>(code, kReduceOps.size(), "reduce op"); }
// What programs may submit; process sets and shutdown have calls of their own.
OpKind kind_of(int code) {
  return checked_enum<OpKind>(code, static_cast<size_t>(OpKind::AddSet), "operation");
}

// Numbers by key, with what is missing or unknown refused: a typing error must not become a
// default.
class Dict {
 public:
  Dict(nb::dict dict, const char* what) : dict_(std::move(dict)), what_(what) {}

  template <typename T>
  T take(const char* key) {
    if (!dict_.contains(key)) {
      throw Error(ErrorKind::InvalidArgument, std::string(what_) + " lacks " + key);
    }
    ++taken_;
    return nb::cast<T>(dict_[key]);
  }
  template <typename T>
  T take(const char* key, T otherwise) {
    return dict_.contains(key) ? take<T>(key) : otherwise;
  }
  void finish() const {
    if (taken_ != dict_.size()) {
      throw Error(ErrorKind::InvalidArgument, std::string(what_) + " has keys nobody knows among " +
                                                  nb::str(dict_.attr("keys")()).c_str());
    }
  }

 private:
  nb::dict dict_;
  const char* what_;
  size_t taken_ = 0;
};

Plan to_plan(nb::dict dict) {
  Dict d(std::move(dict), "the plan");
  Plan plan;
  for (const PlanField& field : kPlanFields) {
    plan.*field.value = d.take(field.name, plan.*field.value);
  }
  plan.segment_bytes = align_up(plan.segment_bytes);
  d.finish();
  if (plan.segment_bytes == 0 || plan.outbox_bytes == 0 ||
      plan.outbox_bytes % (8 * kAlignment) != 0) {
    throw Error(ErrorKind::InvalidArgument,
                "segment_bytes must be positive and outbox_bytes a multiple of 512");
  }
  return plan;
}

std::vector<Descriptor> duplicates(const std::vector<int>& fds) {
  std::vector<Descriptor> out;
  for (const int fd : fds) out.push_back(duplicate(fd));
  return out;
}

// Turns the arguments of Engine() into options; every descriptor is duplicated.
EngineOptions to_options(int32_t rank, int32_t size, std::vector<std::string> names, nb::dict local,
                         nb::dict plan_dict, nb::dict options_dict) {
  if (size < 1 || rank < 0 || rank >= size || names.size() != static_cast<size_t>(size)) {
    throw Error(ErrorKind::InvalidArgument, "rank " + std::to_string(rank) + " of " +
                                                std::to_string(size) + " with " +
                                                std::to_string(names.size()) + " names");
  }
  const Plan plan = to_plan(std::move(plan_dict));
  // A segment has a line for each rank, and must fit a slot.
  if (plan.outbox_bytes < 8 * kAlignment * static_cast<uint64_t>(size)) {
    throw Error(ErrorKind::InvalidArgument,
                "outbox_bytes is less than 512 for each of " + std::to_string(size) + " ranks");
  }
  Dict links(std::move(local), "the links");
  const auto segments = links.take<std::vector<int>>("segments");
  const auto doorbells = links.take<std::vector<int>>("doorbells");
  const auto sockets = links.take<std::vector<int>>("sockets");
  const auto pidfds = links.take<std::vector<int>>("pidfds");
  links.finish();
  for (const auto* fds : {&segments, &doorbells, &sockets, &pidfds}) {
    if (fds->size() != static_cast<size_t>(size)) {
      throw Error(ErrorKind::InvalidArgument, "the links must have one descriptor per rank");
    }
  }
  Dict options(std::move(options_dict), "the options");
  EngineOptions out;
  ProgressOptions& p = out.progress;
  p.rank = rank;
  p.names = std::move(names);
  p.plan = plan;
  p.kernels = &kernels(options.take<std::string>("simd", "auto"));
  p.stores = store_choice(options.take<std::string>("stores", "auto"));
  p.first_set = options.take("first_set", uint32_t{1});
  const bool check_stalls = options.take("stall_check", 1) != 0;
  const auto limit = [&](const char* key, double otherwise) {
    return seconds(options.take(key, otherwise));
  };
  p.stall_warning = limit("stall_warning_s", 60);
  p.stall_shutdown = limit("stall_shutdown_s", 0);
  p.deadlock = limit("deadlock_s", 60);
  p.heartbeat = limit("heartbeat_s", 15);
  if (!check_stalls) p.stall_warning = p.stall_shutdown = Duration{};
  options.finish();

  const auto r = static_cast<size_t>(rank);
  const uint64_t bytes = segment_bytes(static_cast<size_t>(size), plan.outbox_bytes);
  ShmOptions shm{.rank = rank, .outbox_bytes = plan.outbox_bytes, .segments = {}, .doorbells = {}};
  for (const int fd : segments) {
    shm.segments.push_back(size == 1 ? anonymous_segment(bytes) : map_segment(fd, bytes));
  }
  out.doorbell = doorbells[r] < 0 ? make_event() : duplicate(doorbells[r]);
  out.peer_bells = duplicates(doorbells);
  out.peer_bells[r] = {};
  for (size_t y = 0; y < out.peer_bells.size(); ++y) {
    shm.doorbells.push_back(y == r ? out.doorbell.get() : out.peer_bells[y].get());
  }
  p.transport = make_shm(std::move(shm));
  out.sockets = duplicates(sockets);
  out.pidfds = duplicates(pidfds);
  return out;
}

// The engine and what Python must keep alive for it.
class PyEngine {
 public:
  PyEngine(int32_t rank, int32_t size, std::vector<std::string> names, nb::dict local,
           nb::dict plan, nb::dict options)
      : engine_(std::make_shared<Engine>(to_options(rank, size, std::move(names), std::move(local),
                                                    std::move(plan), std::move(options)))) {}
  ~PyEngine() {
    if (engine_->abandoned()) {
      // A forked child: the thread doesn't exist and any lock may be held for ever.
      [[maybe_unused]] const auto* leaked = new std::shared_ptr<Engine>(engine_);
      return;
    }
    const nb::gil_scoped_release release;
    engine_.reset();
  }
  PyEngine(const PyEngine&) = delete;

  int64_t submit(int kind, std::string name, uint32_t set, std::vector<Tensor> tensors, int op,
                 double prescale, double postscale, int32_t root,
                 std::optional<std::vector<int64_t>> splits, bool unnamed, nb::object keep,
                 uint32_t site, nb::object finish) {
    auto call = std::make_shared<LocalCall>();
    call->kind = kind_of(kind);
    call->op = op_of(op);
    call->root = root;
    call->prescale = prescale;
    call->postscale = postscale;
    call->tensors = std::move(tensors);
    call->has_splits = splits.has_value();
    if (splits) call->splits = std::move(*splits);
    call->request.set = set;
    call->request.name = std::move(name);
    call->request.unnamed = unnamed;
    PyCall ours;
    ours.keep = std::move(keep);
    ours.finish = std::move(finish);
    return add(std::move(call), site, std::move(ours));
  }

  // As submit, of what `form` can read: a tensor, or a list of them for a grouped call. Without a
  // name the call gets the next number. If a tensor or the name can't be read nothing happens, and
  // there is no handle.
  std::optional<int64_t> start(const Form& form, int kind, nb::str prefix, nb::object name,
                               bool unnamed, uint32_t set, bool grouped, nb::object tensors, int op,
                               double prescale, double postscale, int32_t root, uint32_t site) {
    auto call = std::make_shared<LocalCall>();
    PyCall ours;
    try {
      if (!form.read(grouped, tensors, call->tensors, ours)) return std::nullopt;
    } catch (const nb::python_error& error) {
      // Whoever can tell the other ranks is to meet it again.
      if (error.matches(PyExc_Exception)) return std::nullopt;
      throw;
    } catch (const Error&) {
      return std::nullopt;
    }
    std::string& full = call->request.name;
    full = *text_of(prefix);
    full += '.';
    if (name.is_none()) {
      unnamed = true;
      full += "noname." + std::to_string(next_number(set, nb::cast<std::string>(prefix)));
    } else {
      const auto given = text_of(name);
      if (!given) return std::nullopt;
      full += *given;
    }
    call->kind = kind_of(kind);
    call->op = op_of(op);
    call->root = root;
    call->prescale = prescale;
    call->postscale = postscale;
    call->request.set = set;
    call->request.unnamed = unnamed;
    return add(std::move(call), site, std::move(ours));
  }

  // Numbers of unnamed calls, from 1 in each sequence.
  uint64_t next_number(uint32_t set, std::string prefix) {
    const nb::ft_lock_guard lock(mutex_);
    return ++numbers_[{set, std::move(prefix)}];
  }
  void renumber() {
    const nb::ft_lock_guard lock(mutex_);
    numbers_.clear();
  }

  int64_t change_sets(OpKind kind, std::vector<int32_t> ranks, int32_t uid, uint32_t site) {
    auto call = std::make_shared<LocalCall>();
    call->kind = kind;
    call->request.name = next_set_call(kind);
    call->request.unnamed = true;
    call->request.root = uid;
    call->request.ranks = std::move(ranks);
    return add(std::move(call), site, {});
  }

  void reject_process_set(std::string text) {
    engine_->reject({OpKind::AddSet, 0, next_set_call(OpKind::AddSet), std::move(text)});
  }

  void reject(int kind, std::string name, uint32_t set, std::string text) {
    engine_->reject({kind_of(kind), set, std::move(name), std::move(text)});
  }

  bool wait(int64_t handle, double timeout_s) {
    // In slices, so that a signal's Python handler runs.
    const auto end = std::chrono::steady_clock::now() + seconds(timeout_s);
    for (;;) {
      bool done;
      {
        const nb::gil_scoped_release release;
        const auto left = end - std::chrono::steady_clock::now();
        done = engine_->wait(handle, std::clamp<Duration>(left, Duration{}, kSignalSlice));
      }
      // Also if it is done: what Python raises next would lose the result.
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (done) return true;
      if (std::chrono::steady_clock::now() >= end) return false;
    }
  }

  Result take(int64_t handle) {
    auto call = engine_->take(handle);
    const PyCall kept = extract(handle);  // dropped after the lock
    return Result(std::move(call));
  }

  // Waits for a call and gives what it came to, once; None for what is no handle, or no longer.
  nb::object finish(nb::handle number) {
    const nb::object index = nb::steal(PyNumber_Index(number.ptr()));
    if (!index.is_valid()) throw nb::python_error();
    const int64_t handle = PyLong_AsLongLong(index.ptr());
    PyErr_Clear();  // a number beyond every handle's
    LocalCallPtr call;
    {
      const nb::ft_lock_guard lock(mutex_);
      if (const auto it = calls_.find(handle); it != calls_.end()) call = it->second.call;
    }
    if (call == nullptr) return nb::none();
    try {
      if (!call->done.load(std::memory_order_acquire)) wait(handle, kForEver);
      PyCall ours = extract(handle);
      if (ours.call == nullptr) return nb::none();  // another thread was faster
      engine_->take(handle);
      if (call->status.ok()) return std::move(ours).outcome();
    } catch (const Error& error) {
      if (error.status().kind == ErrorKind::InvalidArgument) return nb::none();  // the same
      throw CallError{error.status(), call->request.name};
    }
    throw CallError{call->status, call->request.name};
  }

  std::map<int64_t, std::string> calls() {
    const nb::ft_lock_guard lock(mutex_);
    std::map<int64_t, std::string> names;
    for (const auto& [handle, ours] : calls_) names.emplace(handle, ours.call->request.name);
    return names;
  }

  void shutdown(const std::string& reason, double timeout_s) {
    const nb::gil_scoped_release release;
    engine_->shutdown(reason, seconds(timeout_s));
  }

  std::optional<std::tuple<int, std::string, int32_t>> failure() {
    const auto status = engine_->failure();
    if (!status) return std::nullopt;
    return std::tuple(static_cast<int>(status->kind), status->text, status->rank);
  }

  std::vector<std::pair<int, std::string>> take_messages() {
    std::vector<std::pair<int, std::string>> out;
    for (LogLine& line : engine_->take_messages())
      out.emplace_back(line.level, std::move(line.text));
    return out;
  }

  Engine& engine() { return *engine_; }
  const std::shared_ptr<Engine>& shared() { return engine_; }

 private:
  // Matched by call number, like every unnamed call.
  std::string next_set_call(OpKind kind) {
    return std::string(info(kind).name) + ".noname." + std::to_string(set_calls_++);
  }

  int64_t add(LocalCallPtr call, uint32_t site, PyCall ours) {
    ours.call = call;
    const int64_t handle = engine_->submit(std::move(call), site);
    const nb::ft_lock_guard lock(mutex_);
    calls_.emplace(handle, std::move(ours));
    return handle;
  }

  PyCall extract(int64_t handle) {
    const nb::ft_lock_guard lock(mutex_);
    auto node = calls_.extract(handle);
    return node.empty() ? PyCall{} : std::move(node.mapped());
  }

  static constexpr Duration kSignalSlice = std::chrono::milliseconds(100);
  static constexpr double kForEver = std::numeric_limits<double>::infinity();

  std::shared_ptr<Engine> engine_;
  nb::ft_mutex mutex_;                         // of what follows; nothing where there is a GIL
  std::unordered_map<int64_t, PyCall> calls_;  // by handle, until it is taken
  std::map<std::pair<uint32_t, std::string>, uint64_t> numbers_;
  std::atomic<uint64_t> set_calls_{0};
};

// A door is never destroyed: threads of a framework may knock while the process ends.
class PyDoor {
 public:
  void open(PyEngine& engine, int32_t rank, int32_t size, int32_t local_rank, int32_t local_size) {
    door_->open(engine.shared(), {rank, size, local_rank, local_size});
  }
  void close() { door_->close(); }
  Address address() const { return reinterpret_cast<Address>(static_cast<Door*>(door_)); }

 private:
  Doorway* const door_ = new Doorway;
};

Stores stores_of(bool streaming) { return streaming ? Stores::Streaming : Stores::Ordinary; }

// The yard-stick of `horovod bench`, which runs beside an engine and knows nothing of it.
class PyLimit {
 public:
  PyLimit(int32_t rank, int32_t size, int fd, uint64_t slot_bytes, const std::string& simd,
          double patience_s, bool spin)
      : kernels_(kernels(simd)),
        limit_({.rank = rank,
                .size = size,
                .memory = map_segment(fd, limit_bytes(size, slot_bytes)),
                .slot_bytes = slot_bytes,
                .kernels = &kernels_,
                .patience = seconds(patience_s),
                .spin = spin}) {}

  void barrier() {
    const nb::gil_scoped_release release;
    limit_.barrier();
  }
  std::pair<double, double> allreduce(Address data, size_t count, uint64_t slot_bytes,
                                      bool streaming) {
    const nb::gil_scoped_release release;
    const auto span =
        limit_.allreduce(reinterpret_cast<float*>(data), count, slot_bytes, stores_of(streaming));
    const auto at = [](std::chrono::steady_clock::time_point t) {
      return std::chrono::duration<double>(t.time_since_epoch()).count();
    };
    return {at(span.begin), at(span.end)};
  }

 private:
  const Kernels& kernels_;
  Limit limit_;
};

// ---- For tests: kernels on plain addresses ----------------------------------------------------

void fold(const std::string& simd, int dtype, int op, double prescale, double postscale,
          uint32_t divisor, const std::vector<Address>& terms, Address out, Address slot,
          bool streaming, size_t count) {
  std::vector<const std::byte*> pointers;
  for (const Address term : terms) pointers.push_back(pointer(term));
  kernels(simd).fold({dtype_of(dtype), op_of(op), prescale, postscale, divisor}, pointer(out),
                     pointer(slot), stores_of(streaming), pointers.data(), pointers.size(), count);
  store_fence();
}

void copy_to_slot(const std::string& simd, Address slot, bool streaming, Address from,
                  size_t bytes) {
  kernels(simd).copy_to_slot(pointer(slot), stores_of(streaming), pointer(from), bytes);
  store_fence();
}

std::vector<std::string> simd_available() {
  std::vector<std::string> names;
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    try {
      names.emplace_back(kernels(name).name);
    } catch (const Error& e) {
      if (e.status().kind != ErrorKind::Unavailable) throw;
    }
  }
  return names;
}

void bind_engine(nb::module_& m) {
  nb::class_<Result>(m, "Result", "What a finished call gives back; kind 0 is success.")
      .def_prop_ro("kind", &Result::kind)
      .def_prop_ro("text", &Result::text)
      .def_prop_ro("rank", &Result::rank)
      .def("output", &Result::output, nb::rv_policy::automatic, "place"_a,
           "What the core allocated for the tensor at this place in the call.")
      .def_prop_ro("outputs", &Result::outputs, nb::rv_policy::automatic)
      .def_prop_ro("shapes", &Result::shapes)
      .def_prop_ro("splits", &Result::splits)
      .def_prop_ro("value", &Result::value);

  nb::class_<Tensor>(m, "View", "A row-major tensor; without output the engine allocates it.")
      .def(
          "__init__",
          [](Tensor* self, Address input, Address output, int dtype, Shape shape) {
            new (self) Tensor{pointer(input), pointer(output), dtype_of(dtype), std::move(shape)};
          },
          "input"_a, "output"_a, "dtype"_a, "shape"_a);

  nb::class_<Form>(
      m, "Form",
      "How the tensors of a call are read if their types have DLPack's C exchange API, "
      "and how its result is made. See core/bindings_calls.h.")
      .def(nb::init<nb::iterable, nb::object, nb::object, bool, nb::object, nb::object,
                    nb::object>(),
           "types"_a, "hidden"_a, "memory"_a, "in_place"_a, "allocate"_a.none(), "one"_a.none(),
           "group"_a.none());

  nb::class_<PyEngine>(m, "Engine", "One rank's engine. See core/engine.h.")
      .def(nb::init<int32_t, int32_t, std::vector<std::string>, nb::dict, nb::dict, nb::dict>(),
           "rank"_a, "size"_a, "names"_a, "local"_a, "plan"_a, "options"_a)
      .def("submit", &PyEngine::submit, "kind"_a, "name"_a, "process_set"_a, "tensors"_a,
           "reduce_op"_a, "prescale"_a, "postscale"_a, "root"_a, "splits"_a.none(), "unnamed"_a,
           "keep"_a.none(), "site"_a = 0, "finish"_a = nb::none())
      .def("start", &PyEngine::start, "form"_a, "kind"_a, "prefix"_a, "name"_a.none(), "unnamed"_a,
           "process_set"_a, "grouped"_a, "tensors"_a.none(), "reduce_op"_a, "prescale"_a,
           "postscale"_a, "root"_a, "site"_a,
           "As submit, of what the form can read; else None, and nothing has happened.")
      .def("next_number", &PyEngine::next_number, "process_set"_a, "prefix"_a,
           "Of the next unnamed call.")
      .def("renumber", &PyEngine::renumber, "Starts those numbers again.")
      .def("finish", &PyEngine::finish, "handle"_a.none(),
           "Waits for a call and gives its result, once; then and for no handle's number, None.")
      .def("calls", &PyEngine::calls, "Names of what was not taken yet, by handle.")
      .def(
          "add_site",
          [](PyEngine& e, std::string text) { return e.engine().add_site(std::move(text)); },
          "text"_a)
      .def("reject", &PyEngine::reject, "kind"_a, "name"_a, "process_set"_a, "text"_a)
      .def(
          "poll", [](PyEngine& e, int64_t handle) { return e.engine().poll(handle); }, "handle"_a)
      .def("wait", &PyEngine::wait, "handle"_a, "timeout_s"_a)
      .def("take", &PyEngine::take, "handle"_a)
      .def(
          "add_process_set",
          [](PyEngine& e, std::vector<int32_t> ranks, uint32_t site) {
            return e.change_sets(OpKind::AddSet, std::move(ranks), 0, site);
          },
          "ranks"_a, "site"_a = 0)
      .def("reject_process_set", &PyEngine::reject_process_set, "text"_a)
      .def(
          "remove_process_set",
          [](PyEngine& e, int32_t id, uint32_t site) {
            return e.change_sets(OpKind::RemoveSet, {}, id, site);
          },
          "id"_a, "site"_a = 0)
      .def("process_sets", [](PyEngine& e) { return e.engine().process_sets(); })
      .def("shutdown", &PyEngine::shutdown, "reason"_a, "timeout_s"_a)
      .def("abandon", [](PyEngine& e) { e.engine().abandon(); })
      .def("failure", &PyEngine::failure)
      .def("counters", [](PyEngine& e) { return e.engine().counters(); })
      .def("pending", [](PyEngine& e) { return e.engine().pending(); })
      .def("message_fd", [](PyEngine& e) { return e.engine().message_fd(); })
      .def("take_messages", &PyEngine::take_messages);

  nb::class_<PyDoor>(m, "Door", "How native adapters reach the running engine. See core/door.h.")
      .def(nb::init<>())
      .def("open", &PyDoor::open, "engine"_a, "rank"_a, "size"_a, "local_rank"_a, "local_size"_a)
      .def("close", &PyDoor::close, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("address", &PyDoor::address, "Of the C++ object, which is there for good.");
}

void bind_limit(nb::module_& m) {
  m.def("limit_bytes", &limit_bytes, "size"_a, "slot_bytes"_a,
        "Bytes of shared memory that the yard-stick needs.");
  nb::class_<PyLimit>(m, "Limit", "One rank's side of the yard-stick. See core/limit.h.")
      .def(nb::init<int32_t, int32_t, int, uint64_t, const std::string&, double, bool>(), "rank"_a,
           "size"_a, "fd"_a, "slot_bytes"_a, "simd"_a, "patience_s"_a, "spin"_a)
      .def("barrier", &PyLimit::barrier)
      .def("allreduce", &PyLimit::allreduce, "data"_a, "count"_a, "slot_bytes"_a, "streaming"_a,
           "In place, float32; returns when its first barrier and all of it was over, in seconds "
           "of the monotonic clock.");
}

}  // namespace
}  // namespace horovod

NB_MODULE(_core, m) {
  using namespace horovod;
  m.doc() = "The core of horovod: engine, transports and kernels.";
  // A forked child keeps the frames of threads that exist in its parent only, and with them an
  // engine.
  nb::set_leak_warnings(false);

  PyObject* failure = PyErr_NewExceptionWithDoc(
      "horovod._core.Failure",
      "The engine's own error; args are (kind, text, rank), and the name of the call if it ended "
      "that.",
      PyExc_RuntimeError, nullptr);
  m.attr("Failure") = nb::steal(failure).inc_ref();  // one reference is the translator's, for ever
  nb::register_exception_translator(
      [](const std::exception_ptr& p, void* type) {
        try {
          std::rethrow_exception(p);
        } catch (const CallError& e) {
          const Status& s = e.status;
          const nb::object args = nb::make_tuple(static_cast<int>(s.kind), s.text, s.rank, e.name);
          PyErr_SetObject(static_cast<PyObject*>(type), args.ptr());
        } catch (const Error& e) {
          const Status& s = e.status();
          if (s.kind == ErrorKind::InvalidArgument) {
            PyErr_SetString(PyExc_ValueError, s.text.c_str());
            return;
          }
          const nb::object args = nb::make_tuple(static_cast<int>(s.kind), s.text, s.rank);
          PyErr_SetObject(static_cast<PyObject*>(type), args.ptr());
        }
      },
      failure);

  bind_engine(m);
  bind_limit(m);
  m.def("segment_bytes", &segment_bytes, "local_size"_a, "outbox_bytes"_a,
        "Bytes that a rank's shared segment must have.");
  m.def("simd_available", &simd_available, "Instruction sets whose kernels run here.");
  m.def("fold", &fold, "simd"_a, "dtype"_a, "op"_a, "prescale"_a, "postscale"_a, "divisor"_a,
        "terms"_a, "out"_a, "slot"_a, "streaming"_a, "count"_a,
        "For tests: one kernel on plain addresses.");
  m.def("copy_to_slot", &copy_to_slot, "simd"_a, "slot"_a, "streaming"_a, "source"_a, "bytes"_a,
        "For tests: the copy into a transport slot.");
}
