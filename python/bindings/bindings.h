// Each area of the library adds its names to the module, by one function; and what the areas share.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

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

// A member of a struct, by its name in Python. A constructor may be called without a preset one, which keeps the struct's value.
template <bool is_preset, class Struct, class Value>
struct Field {
  const char* name;
  Value Struct::*member;
  const char* meaning;

  std::tuple<Value Struct::*> members() const { return {member}; }
  auto argument() const {
    if constexpr (is_preset) {
      return py::arg(name) = Struct{}.*member;
    } else {
      return py::arg(name);
    }
  }
};
template <class Struct, class Value>
Field<false, Struct, Value> field(const char* name, Value Struct::*member, const char* meaning = "") {
  return {name, member, meaning};
}
template <class Struct, class Value>
Field<true, Struct, Value> preset(const char* name, Value Struct::*member, const char* meaning = "") {
  return {name, member, meaning};
}

// The constructor takes the fields after it by name only.
struct ByName {
  std::tuple<> members() const { return {}; }
  py::kw_only argument() const { return {}; }
};

// Binds a struct whose fields Python reads.
template <class Struct, class... Fields>
py::class_<Struct> readable(py::module_& module, const char* name, const Fields&... fields) {
  py::class_<Struct> type(module, name);
  const auto show = [&](const auto& field) {
    if constexpr (requires { field.member; }) type.def_readonly(field.name, field.member, field.meaning);
  };
  (show(fields), ...);
  return type;
}

// Binds a struct that Python makes from its fields, in this order.
template <class Struct, class... Fields>
py::class_<Struct> record(py::module_& module, const char* name, const Fields&... fields) {
  const auto maker = []<class... Values>(Values Struct::*... members) {
    return [members...](Values... values) {
      Struct made{};
      ((made.*members = std::move(values)), ...);
      return made;
    };
  };
  auto type = readable<Struct>(module, name, fields...);
  type.def(py::init(std::apply(maker, std::tuple_cat(fields.members()...))), fields.argument()...);
  return type;
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
