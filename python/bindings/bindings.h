// Each area of the library adds its names to the module, by one function; and what the areas share.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

#include <algorithm>
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

// The name of a type of the package, such as a TypedDict.
template <std::size_t size>
struct TypeName {
  constexpr TypeName(const char (&name)[size]) { std::copy_n(name, size, text); }
  char text[size]{};
};

// An object of Python that has this type.
template <TypeName name>
class Typed : public py::object {
 public:
  PYBIND11_OBJECT_DEFAULT(Typed, object, PyObject_Type)
};

using Released = py::call_guard<py::gil_scoped_release>;  // calls that work or wait use it

// An array with an entry for each value of an enumeration, as a dictionary.
template <class Enum, class Value, std::size_t count>
py::typing::Dict<std::string, Value> by_name(const std::array<Value, count>& values) {
  py::typing::Dict<std::string, Value> named;
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

template <ballast::python::TypeName of_type>
struct pybind11::detail::handle_type_name<ballast::python::Typed<of_type>> {
  static constexpr auto name = const_name(of_type.text);
};
