#include <ballast/placement.h>

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include "python/bindings/bindings.h"
#include "zero/plan/collective_memory.h"

namespace ballast::python {

void bind_placement(py::module_& module) {
  py::class_<Spread>(module, "Spread")
      .def(py::init<double, double, double>(), py::kw_only(), py::arg("device") = 0.0, py::arg("host") = 0.0,
           py::arg("nvme") = 0.0)
      .def_readonly("device", &Spread::device)
      .def_readonly("host", &Spread::host)
      .def_readonly("nvme", &Spread::nvme)
      .def(
          "__eq__", [](const Spread& a, const Spread& b) { return a == b; }, py::is_operator());
  module.def("all_in", &all_in, py::arg("tier"));

  py::class_<Placement>(module, "Placement")
      .def_readonly("shards", &Placement::shards)
      .def_readonly("replicas", &Placement::replicas)
      .def_readwrite("parameter_replicas", &Placement::parameter_replicas)
      .def_readonly("full_parameters", &Placement::full_parameters)
      .def_readwrite("reduction", &Placement::reduction)
      .def_readwrite("parameters", &Placement::parameters)
      .def_readwrite("gradients", &Placement::gradients)
      .def_readwrite("state", &Placement::state)
      .def("check", [](const Placement& placement) { check(placement); });
  module.def("placement_of_stage", &placement_of_stage, py::arg("stage"), py::arg("ranks"));

  py::class_<Wire>(module, "Wire")
      .def(py::init<>())
      .def_readwrite("gather", &Wire::gather)
      .def_readwrite("reduce", &Wire::reduce)
      .def_readwrite("across", &Wire::across)
      .def(
          "check", [](const Wire& wire, const Placement& placement) { check(wire, placement); }, py::arg("placement"));
}

}  // namespace ballast::python
