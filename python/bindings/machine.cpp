// The machine of a plan: real or imagined. (this_machine.cpp has the one on which this process runs.)
#include <ballast/planner.h>

#include "python/bindings/bindings.h"

namespace ballast::python {
namespace {

template <std::size_t tier>
void bind_bytes(py::class_<Machine>& type, const char* name) {
  type.def_property(
      name, [](const Machine& machine) { return machine.bytes[tier]; },
      [](Machine& machine, std::size_t bytes) { machine.bytes[tier] = bytes; });
}

}  // namespace

void bind_machine(py::module_& module) {
  py::class_<Machine> machine(module, "Machine");
  machine.def(py::init<>())
      .def("__copy__", [](const Machine& other) { return other; })
      .def_readwrite("gather", &Machine::gather)
      .def_readwrite("reduce", &Machine::reduce)
      .def_readwrite("across", &Machine::across)
      .def_readwrite("ranks_per_host", &Machine::ranks_per_host)
      .def_readwrite("upload", &Machine::upload)
      .def_readwrite("download", &Machine::download)
      .def_readwrite("read", &Machine::read)
      .def_readwrite("write", &Machine::write)
      .def_readwrite("device_memory", &Machine::device_memory)
      .def_readwrite("host_memory", &Machine::host_memory)
      .def_readwrite("products", &Machine::products)
      .def_readwrite("collective_latency", &Machine::collective_latency)
      .def_readwrite("commit_latency", &Machine::commit_latency)
      .def_readwrite("shares_cores", &Machine::shares_cores)
      .def_readwrite("host_is_device", &Machine::host_is_device);
  bind_bytes<0>(machine, "device_bytes");
  bind_bytes<1>(machine, "host_bytes");
  bind_bytes<2>(machine, "nvme_bytes");
}

}  // namespace ballast::python
