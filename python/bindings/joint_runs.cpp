// Runs that are resumed together.
#include <ballast/joint_runs.h>
#include <ballast/training.h>
#include <pybind11/stl.h>

#include "python/bindings/group.h"

namespace ballast::python {
namespace {

std::vector<RunCommit> commits_of(const Group& group, const std::vector<std::string>& directories,
                                  const std::string& run) {
  return commits_of_run(group.communicator(), {.directories = {directories.begin(), directories.end()}, .run = run});
}

}  // namespace

void bind_joint_runs(py::module_& module) {
  py::class_<JointRound>(module, "JointRound")
      .def(py::init([](std::uint64_t start, std::uint64_t number, std::uint64_t members) {
             return JointRound{start, number, members};
           }),
           py::arg("start") = 0, py::arg("number") = 0, py::arg("members") = 0);
  py::class_<RunPoint>(module, "RunPoint").def(py::init<>());
  py::class_<RunCommit>(module, "RunCommit").def_readonly("step", &RunCommit::step);
  module.def("commits_of_run", commits_of, py::arg("group"), py::arg("directories"), py::arg("run"),
             py::call_guard<py::gil_scoped_release>());
  module.def(
      "newest_joint_points",
      [](const std::vector<std::vector<RunCommit>>& runs, const std::vector<std::string>& names) {
        return newest_joint_points(runs, names);
      },
      py::arg("runs"), py::arg("names"));
}

}  // namespace ballast::python
