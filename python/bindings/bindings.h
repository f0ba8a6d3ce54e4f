// Each area of the library adds its names to the module, by one function; and what the areas share.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <optional>
#include <string>

namespace ballast::python {

namespace py = pybind11;
using namespace py::literals;

// Memory that Python sees. `owner` keeps its owner alive, such as a training.
struct Memory {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::optional<int> gpu{};
  py::object owner{};
};

using Released = py::call_guard<py::gil_scoped_release>;  // calls that work or wait use it

// An array with an entry for each value of an enumeration, as a dictionary.
template <class Enum, class Value, std::size_t count>
py::dict by_name(const std::array<Value, count>& values) {
  py::dict named;
  for (std::size_t i = 0; i < count; ++i) {
    named[py::str(std::string(name(static_cast<Enum>(i))))] = values[i];
  }
  return named;
}

void bind_errors(py::module_& module);
void bind_model(py::module_& module);
void bind_plan(py::module_& module);
void bind_this_machine(py::module_& module);
void bind_group(py::module_& module);
void bind_memory(py::module_& module);
void bind_training(py::module_& module);
void bind_checkpoint(py::module_& module);
void bind_activations(py::module_& module);

}  // namespace ballast::python
