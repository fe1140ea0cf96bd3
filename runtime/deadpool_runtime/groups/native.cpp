// What Python cannot reach in torch's communicators, and nothing more.
//
// A c10d::ProcessGroup is a front object: DDP's reducer, DeviceMesh, functional collectives and
// user code all hold it, and it forwards every call to a Backend. Replacing the Backend rebuilds
// the communicator while every holder keeps its object. The maps that lead to the Backend are
// protected and the Python setters only ever add to them, hence this file.
//
// Only the headers that are needed are included, since this is compiled on the user's machine.

#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/FakeProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

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
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  // Dropping the last reference to a backend joins its threads, and they may need the GIL.
  module.def(
      "set_backends", &GroupAccess::set_backends, py::call_guard<py::gil_scoped_release>());
  module.def("detached_backend", [](int rank, int size) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<DetachedBackend>(rank, size));
  });
  module.def("freeze_buckets", &ReducerAccess::freeze_buckets);
  module.def("keep_buckets", &ReducerAccess::keep_buckets);
}
