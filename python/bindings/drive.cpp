// Measures what a directory's drive can do.
#include "offload/preflight.h"
#include "python/bindings/bindings.h"

namespace ballast::python {
namespace {

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

void bind_drive(py::module_& module) {
  module.def("inspect_drive", inspect_drive, py::arg("directory"), py::kw_only(), py::arg("bytes"));
  module.def(
      "require_io_uring", [] { offload::uring_queue({.depth = 1}); }, py::call_guard<py::gil_scoped_release>(),
      "Raises B2201 where there is none.");
}

}  // namespace ballast::python
