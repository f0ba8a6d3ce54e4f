// The machine on which this process runs: the processors, memory, GPUs and drives that it may use; and sizes of memory in words.
#include <pybind11/stl.h>

#include "kernels/runtime/machine.h"
#include "kernels/runtime/sizes.h"
#include "kernels/simd/isa.h"
#include "offload/preflight.h"
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

// Writes and reads `bytes`. Measures a directory on a network file system too, because the report says what it is.
py::dict inspect_drive(const std::string& directory, std::size_t bytes) {
  offload::DriveReport report;
  {
    const py::gil_scoped_release released;
    Log quiet([](Level, std::string_view) {});
    const auto queue = offload::open_queue({.log = &quiet});
    report = offload::inspect(directory, *queue, {.bytes = bytes, .file = {.allow_network = true}});
  }
  py::dict found;
  found["file_system"] = report.file_system;
  found["is_network"] = report.is_network;
  found["free_bytes"] = report.free_bytes;
  found["buffered_because"] = report.buffered_because;
  found["queue"] = report.queue;
  found["read"] = report.read_bytes_per_second;
  found["write"] = report.write_bytes_per_second;
  found["both"] = report.both_bytes_per_second;
  return found;
}

}  // namespace

void bind_this_machine(py::module_& module) {
  module.def("parse_bytes", &parse_bytes, py::arg("text"), "\"512MiB\", \"40GB\", \"1e9\" as a number.");
  module.def("human_bytes", &human_bytes, py::arg("bytes"), "\"1.5 GiB\".");
  module.def("this_machine", this_machine, py::kw_only(), py::arg("root") = "/");
  module.def("inspect_drive", inspect_drive, py::arg("directory"), py::kw_only(), py::arg("bytes"));
  module.def(
      "require_io_uring", [] { offload::uring_queue({.depth = 1}); }, Released(), "Raises B2201 where there is none.");
}

}  // namespace ballast::python
