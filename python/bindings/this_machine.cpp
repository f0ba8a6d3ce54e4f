// The processors, memory and GPUs that this process may use.
#include <pybind11/stl.h>

#include "kernels/runtime/machine.h"
#include "kernels/simd/isa.h"
#include "python/bindings/bindings.h"
#include "zero/comm/process_transport.h"

namespace ballast::python {
namespace {

py::dict dictionary(const Gpu& gpu) {
  py::dict found;
  found["name"] = gpu.name;
  found["pci"] = gpu.pci;
  found["memory_bytes"] = gpu.memory_bytes;
  found["compute_capability"] = py::make_tuple(gpu.major, gpu.minor);
  return found;
}

py::dict dictionary(const HostLimits& limits) {
  py::dict found;
  found["total_bytes"] = limits.total_bytes;
  found["available_bytes"] = limits.available_bytes;
  found["memlock_bytes"] = limits.memlock_bytes;
  found["address_space_bytes"] = limits.address_space_bytes;
  found["cgroup"] = py::none();
  if (limits.cgroup) {
    py::dict cgroup;
    cgroup["limit_bytes"] = limits.cgroup->limit_bytes;
    cgroup["available_bytes"] = limits.cgroup->available_bytes();
    cgroup["file"] = limits.cgroup->file.string();
    found["cgroup"] = cgroup;
  }
  return found;
}

py::dict this_machine(const std::string& root) {
  const ThisMachine machine = [&] {
    const py::gil_scoped_release released;
    return detect_machine(root);
  }();
  py::dict found;
  found["cpu"] = machine.cpu;
  found["cores"] = machine.cores;
  found["cores_of_host"] = machine.cores_of_host;
  found["core_quota"] = machine.core_quota;
  found["numa_nodes"] = machine.numa_nodes;
  found["instruction_set"] = std::string(kernels::simd::name(kernels::simd::usable_isas().front()));
  found["memory"] = dictionary(machine.memory);
  py::list gpus;
  for (const Gpu& gpu : machine.gpus) {
    gpus.append(dictionary(gpu));
  }
  found["gpus"] = gpus;
  found["no_gpu_because"] = machine.no_gpu_because;
  found["no_nccl_because"] = no_nccl_because();
  return found;
}

}  // namespace

void bind_this_machine(py::module_& module) {
  module.def("this_machine", this_machine, py::kw_only(), py::arg("root") = "/");
}

}  // namespace ballast::python
