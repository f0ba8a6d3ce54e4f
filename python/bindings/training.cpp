// Trainings, for python/ballast/wrapper/.
#include <pybind11/functional.h>
#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include "python/bindings/by_name.h"
#include "python/bindings/session.h"

namespace ballast::python {
namespace {

py::dict dict_of(const Metrics& metrics) {
  py::dict named;
  named["seconds"] = metrics.seconds;
  named["on_demand"] = metrics.on_demand;
  named["verified"] = metrics.verified;
  named["bytes"] = by_name<Lane>(metrics.bytes);
  named["busy"] = by_name<Lane>(metrics.busy);
  named["stalls"] = by_name<Lane>(metrics.stalls);
  named["exposed"] = by_name<Phase>(metrics.exposed);
  named["memory"] = by_name<Tier>(metrics.memory);
  return named;
}

void bind_options(py::module_& module) {
  py::class_<SessionOptions>(module, "TrainingOptions")
      .def(py::init<>())
      .def_readwrite("stage", &SessionOptions::stage)
      .def_readwrite("parameters", &SessionOptions::parameters)
      .def_readwrite("gradients", &SessionOptions::gradients)
      .def_readwrite("state", &SessionOptions::state)
      .def_readwrite("directories", &SessionOptions::directories)
      .def_readwrite("run", &SessionOptions::run)
      .def_readwrite("format", &SessionOptions::format)
      .def_readwrite("tile_elements", &SessionOptions::tile_elements)
      .def_readwrite("backward_order", &SessionOptions::backward_order)
      .def_readwrite("threads", &SessionOptions::threads)
      .def_readwrite("gpu", &SessionOptions::gpu)
      .def_readwrite("stream", &SessionOptions::stream)
      .def_readwrite("keeps_timeline", &SessionOptions::keeps_timeline)
      .def_readwrite("update_in_backward", &SessionOptions::update_in_backward)
      .def_readwrite("verify", &SessionOptions::verify);
}

void bind_result(py::module_& module) {
  py::class_<StepResult>(module, "StepResult")
      .def_readonly("skipped", &StepResult::skipped)
      .def_readonly("norm", &StepResult::norm)
      .def_readonly("step", &StepResult::step)
      .def_readonly("reason", &StepResult::reason)
      .def_property_readonly("metrics", [](const StepResult& result) { return dict_of(result.metrics); })
      .def_property_readonly("pace", [](const StepResult& result) { return to_text(result.straggler); });
}

// What Python gets keeps the training alive.
template <auto method>
Memory memory_of(const py::object& training, std::size_t unit) {
  Memory memory = (training.cast<Session&>().*method)(unit);
  memory.owner = training;
  return memory;
}

// What it is shown keeps the training alive.
OwnStep own_step_of(const py::object& training, const py::object& own_step) {
  if (own_step.is_none()) return {};
  return [&](const std::vector<TileToUpdate>& tiles, float gradient_factor) {
    const py::gil_scoped_acquire lock;
    py::list shown;
    for (TileToUpdate tile : tiles) {
      tile.gradients.owner = tile.masters.owner = training;
      shown.append(std::move(tile));
    }
    own_step(shown, gradient_factor);
  };
}

void bind_step(py::module_& module, py::class_<Session>& training) {
  py::class_<TileToUpdate>(module, "TileToUpdate")
      .def_readonly("unit", &TileToUpdate::unit)
      .def_readonly("first", &TileToUpdate::first)
      .def_readonly("gradients", &TileToUpdate::gradients)
      .def_readonly("masters", &TileToUpdate::masters);
  training.def(
      "step",
      [](const py::object& self, const std::vector<optim::Rule>& rules, const std::vector<std::uint64_t>& begun_at,
         double max_norm, double loss_scale, bool discard, const py::object& own_step) {
        return self.cast<Session&>().step(
            {rules, begun_at, max_norm, loss_scale, discard, own_step_of(self, own_step)});
      },
      py::kw_only(), py::arg("rules"), py::arg("begun_at"), py::arg("max_norm"), py::arg("loss_scale"),
      py::arg("discard"), py::arg("own_step") = py::none());
}

// With the numbers of Python's levels.
std::vector<std::pair<int, std::string>> take_log(Session& session) {
  std::vector<std::pair<int, std::string>> lines;
  for (auto& [level, line] : session.take_log()) {
    lines.emplace_back(10 * (static_cast<int>(level) + 1), std::move(line));
  }
  return lines;
}

void bind_session(py::class_<Session>& training) {
  training
      .def(py::init<Model, py::object, py::object, std::vector<optim::Rule>, const SessionOptions&>(), py::kw_only(),
           py::arg("model"), py::arg("group"), py::arg("norm_group"), py::arg("rules"), py::arg("options"))
      .def("take_log", take_log)
      .def_property_readonly("found", &Session::found)
      .def("start", &Session::start, py::arg("fill"))
      .def_property_readonly("steps", &Session::steps)
      .def("tensor_begins", &Session::tensor_begins, py::arg("unit"))
      .def("full_parameters", memory_of<&Session::full_parameters>, py::arg("unit"))
      .def("lend_parameters", memory_of<&Session::lend_parameters>, py::arg("unit"))
      .def("lend_gradients", memory_of<&Session::lend_gradients>, py::arg("unit"))
      .def("give_back", &Session::give_back)
      .def("prepare", &Session::prepare, py::kw_only(), py::arg("rules"), py::arg("begun_at"))
      .def("gradient_norm", &Session::gradient_norm, py::kw_only(), py::arg("loss_scale"))
      .def("tensor_norms", &Session::tensor_norms, py::kw_only(), py::arg("loss_scale"))
      .def("step_as_prepared", &Session::step_as_prepared)
      .def("finish", &Session::finish)
      .def("leave_device", &Session::leave_device, py::kw_only(), py::arg("parameters"), py::arg("agree"))
      .def("return_to_device", &Session::return_to_device, py::kw_only(), py::arg("agree"));
}

void bind_state(py::class_<Session>& training) {
  training.def("parts", &Session::parts, py::arg("unit"), py::arg("tensor"))
      .def("read_moment", &Session::read_moment, py::arg("unit"), py::arg("tensor"), py::arg("moment"), py::kw_only(),
           py::arg("into"))
      .def("write_moments", &Session::write_moments, py::arg("address_of"))
      .def("take_full_parameters", &Session::take_full_parameters, py::arg("written"))
      .def("parameters_changed", &Session::parameters_changed)
      .def("write_parameters", &Session::write_parameters, py::arg("fill"))
      .def("kind", &Session::kind, py::arg("unit"))
      .def("own_parts", &Session::own_parts)
      .def("look_at_parts", &Session::look_at_parts, py::arg("look"))
      .def("change_parts", &Session::change_parts, py::arg("change"), py::arg("agree"))
      .def("continue_from", &Session::continue_from, py::arg("steps"))
      .def_property_readonly("unpinned_because", &Session::unpinned_because)
      .def("ledger", &Session::ledger, py::arg("own_state"))
      .def("chrome_trace", &Session::chrome_trace);
}

}  // namespace

void bind_training(py::module_& module) {
  bind_options(module);
  bind_result(module);
  py::native_enum<kernels::Moment>(module, "Moment", "enum.Enum")
      .value("momentum", kernels::Moment::momentum)
      .value("variance", kernels::Moment::variance)
      .finalize();
  py::class_<Session> training(module, "Training");
  bind_session(training);
  bind_step(module, training);
  bind_state(training);
}

}  // namespace ballast::python
