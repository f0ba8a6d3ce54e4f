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
  return py::dict("name"_a = gpu.name, "pci"_a = gpu.pci, "memory_bytes"_a = gpu.memory_bytes,
                  "compute_capability"_a = py::make_tuple(gpu.major, gpu.minor));
}

py::dict dictionary(const HostLimits& limits) {
  py::object cgroup = py::none();
  if (const auto& limit = limits.cgroup) {
    cgroup =
        py::dict("limit_bytes"_a = limit->limit, "available_bytes"_a = limit->left(), "file"_a = limit->file.string());
  }
  return py::dict("total_bytes"_a = limits.total_bytes, "available_bytes"_a = limits.available_bytes,
                  "memlock_bytes"_a = limits.memlock_bytes, "address_space_bytes"_a = limits.address_space_bytes,
                  "cgroup"_a = cgroup);
}

Typed<"ballast.planning.hardware.MachineFound"> this_machine(const std::string& root) {
  const ThisMachine machine = [&] {
    const py::gil_scoped_release released;
    return detect_machine(root);
  }();
  py::list gpus;
  for (const Gpu& gpu : machine.gpus) {
    gpus.append(dictionary(gpu));
  }
  const std::string isa(kernels::simd::name(kernels::simd::usable_isas().front()));
  return py::dict("cpu"_a = machine.cpu, "cores"_a = machine.cores, "cores_of_host"_a = machine.cores_of_host,
                  "core_quota"_a = machine.core_quota, "numa_nodes"_a = machine.numa_nodes, "instruction_set"_a = isa,
                  "memory"_a = dictionary(machine.memory), "gpus"_a = gpus, "no_gpu_because"_a = machine.no_gpu_because,
                  "no_nccl_because"_a = no_nccl_because());
}

// Writes and reads `bytes`. Measures a directory on a network file system too, because the report says what it is.
offload::DriveReport inspect_drive(const std::string& directory, std::size_t bytes) {
  Log quiet([](Level, std::string_view) {});
  const auto queue = offload::open_queue({.log = &quiet});
  return offload::inspect(directory, *queue, {.bytes = bytes, .file = {.allow_network = true}});
}

}  // namespace

void bind_this_machine(py::module_& module) {
  module.def("parse_bytes", &parse_bytes, py::arg("text"), "\"512MiB\", \"40GB\", \"1e9\" as a number.");
  module.def("human_bytes", &human_bytes, py::arg("bytes"), "\"1.5 GiB\".");
  module.def("this_machine", this_machine, py::kw_only(), py::arg("root") = "/");
  using offload::DriveReport;
  readable<DriveReport>(
      module, "DriveReport", field("file_system", &DriveReport::file_system),
      field("is_network", &DriveReport::is_network), field("free_bytes", &DriveReport::free_bytes),
      field("buffered_because", &DriveReport::buffered_because), field("read", &DriveReport::read_bytes_per_second),
      field("write", &DriveReport::write_bytes_per_second), field("both", &DriveReport::both_bytes_per_second));
  module.def("inspect_drive", inspect_drive, py::arg("directory"), py::kw_only(), py::arg("bytes"), Released());
  module.def(
      "require_io_uring", [] { offload::uring_queue({.depth = 1}); }, Released(), "Raises B2201 where there is none.");
}

}  // namespace ballast::python
