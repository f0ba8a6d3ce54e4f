// Each area of the library adds its names to the module: one function, one file.
#pragma once

#include <pybind11/pybind11.h>

namespace ballast::python {

namespace py = pybind11;

void bind_errors(py::module_& module);
void bind_sizes(py::module_& module);
void bind_names(py::module_& module);
void bind_model(py::module_& module);
void bind_placement(py::module_& module);
void bind_machine(py::module_& module);
void bind_ledger(py::module_& module);
void bind_question(py::module_& module);
void bind_this_machine(py::module_& module);
void bind_drive(py::module_& module);
void bind_connect(py::module_& module);
void bind_rule(py::module_& module);
void bind_memory(py::module_& module);
void bind_joint_runs(py::module_& module);
void bind_training(py::module_& module);
void bind_checkpoint(py::module_& module);
void bind_activations(py::module_& module);

}  // namespace ballast::python
