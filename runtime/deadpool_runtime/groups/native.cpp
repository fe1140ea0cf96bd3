// What Python cannot reach in torch's communicators, and nothing more.
//
// A c10d::ProcessGroup is a front object: DDP's reducer, DeviceMesh, functional collectives and
// user code all hold it, and it forwards every call to a Backend. Replacing the Backend rebuilds
// the communicator while every holder keeps its object. The maps that lead to the Backend are
// protected and the Python setters only ever add to them, hence this file.
//
// Only the headers that are needed are included, since this is compiled on the user's machine.

#include <dlfcn.h>

#include <algorithm>
#include <atomic>

#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/FakeProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "counting.hpp"

namespace py = pybind11;

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Finished work whose result is the tensors it was given. The stock fake backend's work resolves
// to None, which DDP's reducer refuses.
struct FinishedWork : c10d::Work {
  explicit FinishedWork(Tensors tensors) : tensors_(std::move(tensors)) {
    finish();
  }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    return true;
  }
  Tensors result() override {
    return tensors_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(tensors_));
    return future;
  }

  Tensors tensors_;
};

// A backend that has a rank and a size but no peers: every collective succeeds at once.
struct DetachedBackend : c10d::FakeProcessGroup {
  DetachedBackend(int rank, int size)
      : FakeProcessGroup(rank, size, c10::make_intrusive<Options>()) {}

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& /*opts*/) override {
    return c10::make_intrusive<FinishedWork>(tensors);
  }
  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& /*opts*/) override {
    return c10::make_intrusive<FinishedWork>(tensors);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& /*opts*/) override {
    return c10::make_intrusive<FinishedWork>(tensors);
  }
  // Memory that a receive should have filled may hold anything, and programs read sizes and
  // votes from it: zeros for values and ones for integers are safe for both.
  WorkPtr recv(Tensors& tensors, int /*source*/, int /*tag*/) override {
    at::AutoDispatchBelowAutograd guard;
    for (auto& tensor : tensors) {
      tensor.is_floating_point() ? tensor.zero_() : tensor.fill_(1);
    }
    return c10::make_intrusive<FinishedWork>(tensors);
  }
};

// Naming a protected member through a derived class is how C++ lets it be reached.
struct GroupAccess : c10d::ProcessGroup {
  static void set_backends(
      c10d::ProcessGroup& group,
      int default_type,
      const std::vector<std::tuple<std::string, int, c10::intrusive_ptr<c10d::Backend>>>& backends,
      const c10::intrusive_ptr<c10d::Store>& store) {
    auto& by_device = group.*(&GroupAccess::deviceTypeToBackend_);
    auto& by_type = group.*(&GroupAccess::backendTypeToBackend_);
    auto& types = group.*(&GroupAccess::deviceTypeToBackendType_);
    auto& devices = group.*(&GroupAccess::deviceTypes_);
    by_device.clear();
    by_type.clear();
    types.clear();
    devices.clear();
    for (const auto& [device_name, type_number, backend] : backends) {
      const auto device = c10::Device(device_name).type();
      const auto type = static_cast<BackendType>(type_number);
      by_device[device] = backend;
      by_type[type] = backend;
      types[device] = type;
      devices.insert(device);
      backend->setBoundDeviceId(group.getBoundDeviceId());
    }
    if (store) {
      group.*(&GroupAccess::store_) = store;
    }
    group.setDefaultBackend(static_cast<BackendType>(default_type));
  }
  // DDP's reducer and fully_shard divide by the group's size each time they average, so a group
  // with fewer members has to say so. Both numbers are read through virtual functions of torch's
  // library only, which have no reason to keep an older value.
  static void set_shape(c10d::ProcessGroup& group, int rank, int size) {
    const_cast<int&>(group.*(&GroupAccess::rank_)) = rank;
    const_cast<int&>(group.*(&GroupAccess::size_)) = size;
  }
};

struct ReducerAccess : c10d::Reducer {
  // DDP rearranges its buckets once, after the first backward pass, by the order in which
  // gradients arrived there. A process that joins later has not seen that pass. So the buckets
  // are laid out here, and marked as rearranged already.
  static void freeze_buckets(
      c10d::Reducer& reducer,
      std::vector<std::vector<size_t>> bucket_indices) {
    reducer.initialize_buckets(std::move(bucket_indices));
    keep_buckets(reducer);
  }
  static void keep_buckets(c10d::Reducer& reducer) {
    reducer.*(&ReducerAccess::has_rebuilt_bucket_) = true;
  }
  // The next backward pass asks the group how many gradients it averages.
  static void forget_size(c10d::Reducer& reducer) {
    reducer.*(&ReducerAccess::div_factor_) = -1;
  }
};

// Gloo's threads wait for a message to be received or sent in UnboundBuffer::waitRecv and waitSend.
// When a connection breaks after the head of a message was read and before its end, Gloo forgets
// to wake the one who waits for it (Pair::signalException looks at pending operations; this one is
// pending no longer), and only the group's time-out, by default half an hour, ends the wait. So
// both functions are wrapped, through the class's virtual table, by one that knows who waits.
namespace waits {

using Milliseconds = std::chrono::milliseconds;
using Wait = bool (*)(void* buffer, int* rank, Milliseconds timeout);
using Abort = void (*)(void* buffer);

struct Kind {
  Wait wait = nullptr;
  Abort abort = nullptr;
};

Kind receiving;
Kind sending;
std::mutex mutex;
std::vector<std::pair<void*, Abort>> waiting;
std::atomic<bool> aborted{false};

[[noreturn]] void refuse() {
  throw std::runtime_error("the process groups of this process were aborted");
}

struct Entry {
  Entry(void* buffer, Abort abort) : entry_(buffer, abort) {
    std::lock_guard<std::mutex> lock(mutex);
    if (aborted) {
      refuse();
    }
    waiting.push_back(entry_);
  }
  ~Entry() {
    std::lock_guard<std::mutex> lock(mutex);
    waiting.erase(std::find(waiting.begin(), waiting.end(), entry_));
  }
  std::pair<void*, Abort> entry_;
};

bool guarded(const Kind& kind, void* buffer, int* rank, Milliseconds timeout) {
  Entry entry(buffer, kind.abort);
  const bool done = kind.wait(buffer, rank, timeout);
  // Gloo's algorithms take no notice of false and would go on with what is in the buffer.
  if (!done && aborted) {
    refuse();
  }
  return done;
}

bool wait_recv(void* buffer, int* rank, Milliseconds timeout) {
  return guarded(receiving, buffer, rank, timeout);
}

bool wait_send(void* buffer, int* rank, Milliseconds timeout) {
  return guarded(sending, buffer, rank, timeout);
}

// Wraps both functions, once; false where this torch's Gloo is not the one described above.
bool guard() {
  if (receiving.wait != nullptr) {
    return true;
  }
  void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    return false;
  }
#define GLOO_BUFFER "N4gloo9transport3tcp13UnboundBuffer"
#define GLOO_WAIT "EPiNSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"
  auto** table = static_cast<void**>(dlsym(library, "_ZTV" GLOO_BUFFER "E"));
  void* functions[] = {
      dlsym(library, "_Z" GLOO_BUFFER "8waitRecv" GLOO_WAIT),
      dlsym(library, "_Z" GLOO_BUFFER "8waitSend" GLOO_WAIT),
      dlsym(library, "_Z" GLOO_BUFFER "13abortWaitRecvEv"),
      dlsym(library, "_Z" GLOO_BUFFER "13abortWaitSendEv")};
#undef GLOO_BUFFER
#undef GLOO_WAIT
  if (table == nullptr) {
    return false;
  }
  void** slots[] = {nullptr, nullptr};
  for (int entry = 2; entry < 12; ++entry) {
    for (int which : {0, 1}) {
      if (functions[which] != nullptr && table[entry] == functions[which]) {
        slots[which] = &table[entry];
      }
    }
  }
  for (void* part : {functions[2], functions[3], (void*)slots[0], (void*)slots[1]}) {
    if (part == nullptr) {
      return false;
    }
  }
  sending = {reinterpret_cast<Wait>(functions[1]), reinterpret_cast<Abort>(functions[3])};
  receiving = {reinterpret_cast<Wait>(functions[0]), reinterpret_cast<Abort>(functions[2])};
  return counting::put(slots[0], reinterpret_cast<void*>(&wait_recv)) &&
      counting::put(slots[1], reinterpret_cast<void*>(&wait_send));
}

// Ends every wait under way and refuses new ones until `allow`. A buffer that is in the list
// cannot go away meanwhile: whoever waits for it has to take the lock to leave the list.
size_t abort() {
  std::lock_guard<std::mutex> lock(mutex);
  aborted = true;
  for (const auto& [buffer, abort_wait] : waiting) {
    abort_wait(buffer);
  }
  return waiting.size();
}

void allow() {
  aborted = false;
}

} // namespace waits

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  // Dropping the last reference to a backend joins its threads, and they may need the GIL.
  module.def(
      "set_backends", &GroupAccess::set_backends, py::call_guard<py::gil_scoped_release>());
  module.def("set_shape", &GroupAccess::set_shape);
  module.def("detached_backend", [](int rank, int size) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<DetachedBackend>(rank, size));
  });
  module.def("guard_waits", &waits::guard);
  module.def("abort_waits", &waits::abort, py::call_guard<py::gil_scoped_release>());
  module.def("allow_waits", &waits::allow);
  module.def("keep_record_in", &counting::keep_in);
  module.def("watch_collectives", &counting::watch);
  module.def("operations", &counting::names);
  module.def("freeze_buckets", &ReducerAccess::freeze_buckets);
  module.def("keep_buckets", &ReducerAccess::keep_buckets);
  module.def("forget_size", &ReducerAccess::forget_size);
}
