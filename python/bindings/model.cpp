#include <ballast/model.h>

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include "python/bindings/bindings.h"

namespace ballast::python {

void bind_model(py::module_& module) {
  py::class_<Tensor>(module, "Tensor")
      .def(py::init<std::string, std::vector<std::size_t>, std::size_t, bool, bool, std::optional<std::uint64_t>,
                    std::vector<std::size_t>>(),
           py::arg("name"), py::arg("shape"), py::kw_only(), py::arg("group") = 0, py::arg("frozen") = false,
           py::arg("counted") = true, py::arg("number") = py::none(), py::arg("blocks") = std::vector<std::size_t>{})
      .def_readonly("name", &Tensor::name)
      .def_readonly("shape", &Tensor::shape)
      .def_readonly("group", &Tensor::group)
      .def_readonly("frozen", &Tensor::frozen)
      .def_readonly("counted", &Tensor::counted)
      .def_readonly("number", &Tensor::number)
      .def_readonly("blocks", &Tensor::blocks)
      .def_property_readonly("elements", &Tensor::elements);
  py::class_<Tie>(module, "Tie")
      .def(py::init<std::string, std::size_t, std::size_t>(), py::arg("name"), py::kw_only(), py::arg("unit"),
           py::arg("tensor"))
      .def_readonly("name", &Tie::name)
      .def_readonly("unit", &Tie::unit)
      .def_readonly("tensor", &Tie::tensor);
  py::class_<Unit>(module, "Unit")
      .def(py::init<std::string, DType, std::vector<Tensor>, std::vector<Tie>>(), py::arg("name"), py::kw_only(),
           py::arg("dtype"), py::arg("tensors"), py::arg("ties") = std::vector<Tie>{})
      .def_readonly("name", &Unit::name)
      .def_readonly("dtype", &Unit::dtype)
      .def_readonly("tensors", &Unit::tensors)
      .def_readonly("ties", &Unit::ties);
  py::class_<Model>(module, "Model")
      .def(py::init([](std::vector<Unit> units) {
             Model model{std::move(units)};
             check(model);
             return model;
           }),
           py::arg("units"))
      .def_readonly("units", &Model::units);
}

}  // namespace ballast::python
