// Translates C++ errors to those of python/ballast/errors.py, with their parts. Python raises its own errors through it
// too.
#include <ballast/error.h>

#include <pybind11/stl.h>

#include <algorithm>
#include <exception>

#include "kernels/runtime/error_codes.h"
#include "python/bindings/bindings.h"

namespace ballast::python {
namespace {

const char* type_of(const Error& error) {
  switch (error.code()) {
    case Code::host_memory:
    case Code::pinned_memory:
    case Code::device_memory:
    case Code::memory_budget: return "OutOfMemoryError";
    default: break;
  }
  if (dynamic_cast<const UsageError*>(&error) != nullptr) return "UsageError";
  if (dynamic_cast<const ResourceError*>(&error) != nullptr) return "ResourceError";
  return "FailureError";
}

void raise(const Error& error) {
  const py::object type = py::module_::import("ballast.errors").attr(type_of(error));
  const Problem& problem = error.problem();
  const std::string_view usual = describe(error.code()).remedy;
  const py::object made = type(error.what());
  made.attr("code") = label(error.code());
  made.attr("what_happened") = problem.what;
  made.attr("where") = problem.where;
  made.attr("needed") = problem.needed;
  made.attr("available") = problem.available;
  made.attr("remedy") = problem.remedy.empty() ? std::string(usual) : problem.remedy;
  PyErr_SetObject(type.ptr(), made.ptr());
}

void translate(std::exception_ptr thrown) {
  try {
    std::rethrow_exception(std::move(thrown));
  } catch (const Error& error) {
    raise(error);
  }
}

Code code_of(const std::string& name) {
  const auto codes = all_codes();
  const auto found = std::ranges::find(codes, name, &CodeInfo::name);
  require(found != codes.end(), Code::internal, [&] { return Problem{.what = "no error is called " + name}; });
  return found->code;
}

using Text = std::string_view;

std::vector<std::tuple<std::string, Text, Text, Text>> errors() {
  std::vector<std::tuple<std::string, Text, Text, Text>> rows;
  for (const CodeInfo& info : all_codes()) {
    rows.emplace_back(label(info.code), info.name, info.meaning, info.remedy);
  }
  return rows;
}

}  // namespace

void bind_errors(py::module_& module) {
  py::register_local_exception_translator(translate);
  module.def("error_codes", errors, "Code, name, meaning and remedy of every error.");
  py::class_<Problem>(module, "Problem")
      .def(py::init<std::string, std::string, std::string, std::string, std::string>(), py::kw_only(), py::arg("what"),
           py::arg("where") = "", py::arg("needed") = "", py::arg("available") = "", py::arg("remedy") = "");
  // The message is composed before the site's name goes away.
  module.def(
      "fail",
      [](const std::string& name, const Problem& problem, const std::string& file, int line) -> py::typing::NoReturn {
        fail(code_of(name), problem, Site{file.c_str(), line});
      },
      py::kw_only(), py::arg("name"), py::arg("problem"), py::arg("file"), py::arg("line"),
      "Raises the error of this name.");
}

}  // namespace ballast::python
