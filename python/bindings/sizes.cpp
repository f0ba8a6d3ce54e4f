#include "kernels/runtime/sizes.h"

#include "python/bindings/bindings.h"

namespace ballast::python {

void bind_sizes(py::module_& module) {
  module.def("parse_bytes", &parse_bytes, py::arg("text"), "\"512MiB\", \"40GB\", \"1e9\" as a number.");
  module.def("human_bytes", &human_bytes, py::arg("bytes"), "\"1.5 GiB\".");
}

}  // namespace ballast::python
