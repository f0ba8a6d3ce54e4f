// Keeps the tensors that autograd saves on the host or on a drive. Python says which, and when.
#include <pybind11/stl.h>

#include "offload/activation_store.h"
#include "python/bindings/bindings.h"

namespace ballast::python {
namespace {

using offload::ActivationStore;
using offload::Completion;

// The bytes at an address of torch, on the host or on the store's GPU.
std::span<std::byte> at(std::uintptr_t address, std::size_t bytes) {
  return {reinterpret_cast<std::byte*>(address), bytes};
}

StreamHandle handle_of(std::uintptr_t stream) { return reinterpret_cast<StreamHandle>(stream); }

// Log lines of a drive that hangs go to stderr, because threads that log must not wait for Python's lock.
class PythonActivationStore {
 public:
  PythonActivationStore(const std::string& directory, std::size_t memory_bytes, std::optional<int> gpu)
      : store_({.directory = directory, .memory_bytes = memory_bytes, .gpu = gpu, .log = &log_}) {}

  std::pair<ActivationStore::Ticket, Completion> save(std::uintptr_t address, std::size_t bytes,
                                                      std::uintptr_t stream) {
    ActivationStore::Saved saved = store_.save(at(address, bytes), handle_of(stream));
    return {saved.ticket, saved.copied};
  }
  Completion load(ActivationStore::Ticket ticket, std::uintptr_t address, std::size_t bytes, std::uintptr_t stream) {
    return store_.load(ticket, at(address, bytes), handle_of(stream));
  }
  bool is_in_memory(ActivationStore::Ticket ticket) const { return store_.is_in_memory(ticket); }
  void drop(ActivationStore::Ticket ticket) { store_.drop(ticket); }
  ActivationStore::Counters counters() const { return store_.counters(); }

 private:
  Log log_{Log::to_stderr, Level::warning};
  ActivationStore store_;
};

using Figures = py::typing::Dict<std::string, double>;

Figures counters_of(const PythonActivationStore& store) {
  ActivationStore::Counters counters;
  {
    const py::gil_scoped_release released;
    counters = store.counters();
  }
  return Figures("saved_bytes"_a = counters.saved_bytes, "loaded_bytes"_a = counters.loaded_bytes,
                 "written_bytes"_a = counters.written_bytes, "read_bytes"_a = counters.read_bytes,
                 "kept_bytes"_a = counters.kept_bytes, "host_bytes"_a = counters.host_bytes,
                 "drive_bytes"_a = counters.drive_bytes, "waited_seconds"_a = counters.waited_seconds);
}

}  // namespace

// Every call may wait for the drive, or for a thread that does.
void bind_activations(py::module_& module) {
  py::class_<Completion>(module, "Completion")
      .def("is_done", &Completion::is_done)
      .def(
          "order",
          [](const Completion& self, std::uintptr_t stream, int gpu) {
            self.order(Stream::wrap(handle_of(stream), gpu));
          },
          py::arg("stream"), py::arg("gpu"), Released());
  py::class_<PythonActivationStore>(module, "ActivationStore")
      .def(py::init<const std::string&, std::size_t, std::optional<int>>(), py::kw_only(), py::arg("directory"),
           py::arg("memory_bytes"), py::arg("gpu"), Released())
      .def("save", &PythonActivationStore::save, py::arg("address"), py::arg("bytes"), py::arg("stream"), Released())
      .def("load", &PythonActivationStore::load, py::arg("ticket"), py::arg("address"), py::arg("bytes"),
           py::arg("stream"), Released())
      .def("is_in_memory", &PythonActivationStore::is_in_memory, py::arg("ticket"), Released())
      .def("drop", &PythonActivationStore::drop, py::arg("ticket"), Released())
      .def("counters", &counters_of);
}

}  // namespace ballast::python
