// Trainings, for python/ballast/torch/, and runs that are resumed together.
#include <ballast/joint_runs.h>

#include <pybind11/functional.h>
#include <pybind11/native_enum.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include "python/bindings/step_options.h"
#include "python/bindings/training_binding.h"
#include "zero/runs/records.h"

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
  named["timed"] = metrics.timed;
  named["sent_inside"] = metrics.sent_inside;
  named["sent_across"] = metrics.sent_across;
  named["memory"] = by_name<Tier>(metrics.memory);
  return named;
}

// Returns None where the ranks do not know their own times.
py::object dict_of(const Straggler& straggler) {
  if (straggler.seconds == 0.0) return py::none();
  py::dict named;
  named["slowest"] = straggler.slowest;
  named["seconds"] = straggler.seconds;
  named["median"] = straggler.median;
  named["least"] = straggler.least;
  return named;
}

// The function is freed with Python's lock, by whichever thread has it last.
std::shared_ptr<py::function> kept(py::function function) {
  return {new py::function(std::move(function)), [](const py::function* last) {
            const py::gil_scoped_acquire lock;
            delete last;
          }};
}

void set_join_notes(TrainingOptions& options, py::function join) {
  options.drives.join_notes = [join = kept(std::move(join))](const EarlierNotes& notes) {
    const py::gil_scoped_acquire lock;
    py::list texts;
    for (const std::vector<std::byte>& note : notes.notes)
      texts.append(py::bytes(reinterpret_cast<const char*>(note.data()), note.size()));
    const auto joined = (*join)(texts, notes.places).cast<std::string>();
    const auto bytes = std::as_bytes(std::span(joined));
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  };
}

void set_before_write(TrainingOptions& options, py::function before) {
  options.drives.before_write = [before = kept(std::move(before))](RunWrite write) {
    const py::gil_scoped_acquire lock;
    (*before)(write == RunWrite::step);
  };
}

void bind_options(py::module_& module) {
  py::class_<SharedExchanges>(module, "ExchangeOrder").def(py::init<>());
  py::class_<TrainingOptions> type(module, "TrainingOptions");
  type.def(py::init([] { return TrainingOptions{.sums_micro_steps = true}; }),
           "A step adds gradients, as PyTorch does.");
  const auto option = binder(type);
  describe_step_options<TrainingOptions>(option);
  option("parameters", "the tiers of parameters", &TrainingOptions::parameters);
  option("gradients", "the tiers of gradients", &TrainingOptions::gradients);
  option("state", "the tiers of the optimizer's state", &TrainingOptions::state);
  option("threads", "of the CPU; 0: one for each core that this process may use", &TrainingOptions::threads);
  option("gpu", "whose memory the device tier is; None: the host's", &TrainingOptions::gpu);
  option("keeps_timeline", "of what ran when", &TrainingOptions::keeps_timeline);
  option("verify", "steps between two updates that are repeated; 0: never", &TrainingOptions::verify);
  constexpr auto drives = &TrainingOptions::drives;
  option("directories", "of one or several drives", drives, &RecordOptions::directories);
  option("run", "the name of a run that is kept", drives, &RecordOptions::run);
  option("mirror", "writes each record on a drive of another host's rank too", drives, &RecordOptions::mirror);
  option("begins_again", "where records of the run are missing or damaged", drives, &RecordOptions::begins_again);
  option("resume_at", "the commit from which runs are resumed together", drives, &RecordOptions::resume_at);
  bind_backward_order(type, [](TrainingOptions& options) -> Trace& { return options.trace; });
  type.def_property(
          "stream", [](const TrainingOptions& options) { return reinterpret_cast<std::uintptr_t>(options.stream); },
          [](TrainingOptions& options, std::uintptr_t stream) {
            options.stream = reinterpret_cast<StreamHandle>(stream);
          })
      .def(
          "set_join_notes", &set_join_notes, py::arg("join"),
          "Set what makes the note of a run that other ranks began, from the notes of all of them and the place of each "
          "trained parameter in these.")
      .def(
          "set_before_write", &set_before_write, py::arg("before"),
          "Set the function that is called before records of a run are written. Its argument is true for a step, and false for a "
          "change between steps.")
      .def(
          "share_exchanges",
          [](TrainingOptions& options, const SharedExchanges& exchanges) { options.exchanges = exchanges.order; },
          py::arg("exchanges"), "Order exchanges between GPUs with those of other trainings.");
}

void bind_result(py::module_& module) {
  py::class_<StepResult>(module, "StepResult")
      .def_readonly("skipped", &StepResult::skipped)
      .def_readonly("norm", &StepResult::norm)
      .def_readonly("step", &StepResult::step)
      .def_readonly("reason", &StepResult::reason)
      .def_property_readonly("metrics", [](const StepResult& result) { return dict_of(result.metrics); })
      .def_property_readonly("straggler", [](const StepResult& result) { return dict_of(result.straggler); });
}

// Binds a function of the training, or of its state by tensor, as it is. See TrainingBinding::working().
template <class Result, class... Arguments>
auto working(Result (Training::*method)(Arguments...)) {
  return [method](TrainingBinding& self, Arguments... arguments) {
    return self.working([&](Training& training) { return (training.*method)(arguments...); });
  };
}
template <class... Arguments>
auto working(void (TensorState::*method)(Arguments...)) {
  return [method](TrainingBinding& self, Arguments... arguments) {
    self.working([&](Training& training) { (TensorState(training).*method)(arguments...); });
  };
}

// Binds a function that only reads, and does not wait.
template <class Result, class... Arguments>
auto reading(Result (Training::*method)(Arguments...) const) {
  return
      [method](const TrainingBinding& self, Arguments... arguments) { return (self.training().*method)(arguments...); };
}
template <class Result, class... Arguments>
auto reading(Result (TensorState::*method)(Arguments...) const) {
  return [method](const TrainingBinding& self, Arguments... arguments) {
    return (TensorState(self.training()).*method)(arguments...);
  };
}

// Returns memory that keeps the training alive.
template <auto method>
Memory memory_of(const py::object& training, std::size_t unit) {
  Memory memory = (training.cast<TrainingBinding&>().*method)(unit);
  memory.owner = training;
  return memory;
}

// Returns a callback whose tiles keep the training alive.
CustomStep custom_step_of(const py::object& training, const py::object& custom_step) {
  if (custom_step.is_none()) return {};
  return [&](const std::vector<TileToUpdate>& tiles, float gradient_factor, bool is_last) {
    const py::gil_scoped_acquire lock;
    py::list shown;
    for (TileToUpdate tile : tiles) {
      tile.gradients.owner = tile.masters.owner = training;
      for (Memory& values : tile.own)
        values.owner = training;
      shown.append(std::move(tile));
    }
    custom_step(shown, gradient_factor, is_last);
  };
}

void bind_step(py::module_& module, py::class_<TrainingBinding>& training) {
  py::class_<TileToUpdate>(module, "TileToUpdate")
      .def_readonly("unit", &TileToUpdate::unit)
      .def_readonly("first", &TileToUpdate::first)
      .def_readonly("gradients", &TileToUpdate::gradients)
      .def_readonly("gradient_dtype", &TileToUpdate::gradient_dtype)
      .def_readonly("count", &TileToUpdate::count)
      .def_readonly("masters", &TileToUpdate::masters)
      .def_readonly("own", &TileToUpdate::own);
  training.def(
      "step",
      [](const py::object& self, const std::vector<optim::Rule>& rules, const std::vector<std::uint64_t>& missed,
         double max_norm, double loss_scale, bool discard, const py::object& custom_step) {
        return self.cast<TrainingBinding&>().step(
            {rules, missed, max_norm, loss_scale, discard, custom_step_of(self, custom_step)});
      },
      py::kw_only(), py::arg("rules"), py::arg("missed"), py::arg("max_norm"), py::arg("loss_scale"),
      py::arg("discard"), py::arg("custom_step") = py::none());
}

void bind_gradients(py::class_<TrainingBinding>& training) {
  training
      .def(
          "prepare",
          [](TrainingBinding& self, const std::vector<optim::Rule>& rules, const std::vector<std::uint64_t>& missed) {
            self.working([&](Training& training) { training.prepare({.groups = rules, .missed = missed}); });
          },
          py::kw_only(), py::arg("rules"), py::arg("missed"))
      .def("leave_out", working(&Training::leave_out), py::arg("unit"), py::arg("tensor"))
      .def(
          "gradient_norm",
          [](TrainingBinding& self, double loss_scale) {
            return self.working([&](Training& training) { return training.gradient_norm(loss_scale); });
          },
          py::kw_only(), py::arg("loss_scale"))
      .def(
          "tensor_norms",
          [](TrainingBinding& self, double loss_scale) {
            return self.working([&](Training& training) { return training.tensor_norms(loss_scale); });
          },
          py::kw_only(), py::arg("loss_scale"))
      .def(
          "visit_gradients",
          [](const py::object& self, const py::function& visit) {
            const auto show = [&](std::size_t unit, std::size_t tensor, Memory gradients, DType dtype) {
              const py::gil_scoped_acquire lock;
              gradients.owner = self;
              visit(unit, tensor, std::move(gradients), dtype);
            };
            self.cast<TrainingBinding&>().visit_gradients(show);
          },
          py::arg("visit"));
}

// Returns lines with the numbers of Python's levels.
std::vector<std::pair<int, std::string>> take_log(TrainingBinding& training) {
  std::vector<std::pair<int, std::string>> lines;
  for (auto& [level, line] : training.take_log()) {
    lines.emplace_back(10 * (static_cast<int>(level) + 1), std::move(line));
  }
  return lines;
}

void bind_life(py::class_<TrainingBinding>& training) {
  training
      .def(py::init<Model, py::object, py::object, std::vector<optim::Rule>, TrainingOptions>(), py::kw_only(),
           py::arg("model"), py::arg("group"), py::arg("norm_group"), py::arg("rules"), py::arg("options"))
      .def("take_log", take_log)
      .def_property_readonly("found", reading(&Training::found),
                             "A run to resume: start() then requests frozen parameters only.")
      .def_property_readonly(
          "lost",
          [](const TrainingBinding& training) {
            const auto& lost = training.lost();
            return lost ? std::optional(std::pair(lost->reason, lost->step)) : std::nullopt;
          },
          "The reason why a run has begun again, and the newest step that it had; None if it has not.")
      .def("start", &TrainingBinding::start, py::arg("fill"))
      .def_property_readonly("steps", reading(&Training::steps))
      .def(
          "set_note", [](TrainingBinding& training, const py::bytes& note) { training.set_note(note); },
          py::arg("note"))
      .def("note", [](const TrainingBinding& training) { return py::bytes(training.note()); })
      .def("tensor_begins", &TrainingBinding::tensor_begins, py::arg("unit"))
      .def("full_parameters", memory_of<&TrainingBinding::full_parameters>, py::arg("unit"))
      .def("acquire_parameters", memory_of<&TrainingBinding::acquire_parameters>, py::arg("unit"))
      .def("acquire_exact_parameters", memory_of<&TrainingBinding::acquire_exact_parameters>, py::arg("unit"))
      .def_property_readonly("gathers_codes", &TrainingBinding::gathers_codes)
      .def("acquire_gradients", memory_of<&TrainingBinding::acquire_gradients>, py::arg("unit"))
      .def("release", &TrainingBinding::release)
      .def("step_prepared", &TrainingBinding::step_prepared)
      .def("wait_for_parameters", working(&Training::wait_for_parameters), py::arg("unit"))
      .def(
          "wait_for_commit", [](TrainingBinding& self) { self.training().wait_for_commit(); }, Released())
      .def("finish", working(&Training::finish))
      .def("offload", &TrainingBinding::offload, py::kw_only(), py::arg("parameters"), py::arg("agree"))
      .def("reload", &TrainingBinding::reload, py::kw_only(), py::arg("agree"));
}

void bind_state(py::class_<TrainingBinding>& training) {
  training.def("parts", &TrainingBinding::parts, py::arg("unit"), py::arg("tensor"))
      .def("read_moment", &TrainingBinding::read_moment, py::arg("unit"), py::arg("tensor"), py::arg("moment"),
           py::kw_only(), py::arg("into"))
      .def("write_moments", &TrainingBinding::write_moments, py::arg("address_of"))
      .def("take_full_parameters", working(&TensorState::take_full_parameters), py::arg("written"))
      .def("parameters_changed", working(&Training::parameters_changed))
      .def("write_parameters", &TrainingBinding::write_parameters, py::arg("fill"))
      .def("kind", reading(&TensorState::chunk_kind), py::arg("unit"))
      .def("local_shards", reading(&TensorState::parts))
      .def("visit_shards", working(&TensorState::visit), py::arg("visit"))
      .def("change_shards", working(&TensorState::change), py::arg("change"), py::arg("agree"))
      .def("set_steps", &TrainingBinding::set_steps, py::arg("steps"))
      .def_property_readonly(
          "committed",
          py::cpp_function([](const TrainingBinding& self) { return self.training().committed(); }, Released()))
      .def(
          "set_round", [](TrainingBinding& self, const JointRound& round) { self.training().set_round(round); },
          py::arg("round"))
      .def_property_readonly("unpinned_because", reading(&Training::unpinned_because))
      .def("ledger", &TrainingBinding::ledger, py::arg("own_state"))
      .def("chrome_trace", &TrainingBinding::chrome_trace);
}

std::vector<RunCommit> commits_of(const Group& group, const std::vector<std::string>& directories,
                                  const std::string& run) {
  return commits_of_run(group.communicator(), {.directories = {directories.begin(), directories.end()}, .run = run});
}

void bind_joint_runs(py::module_& module) {
  py::class_<JointRound>(module, "JointRound")
      .def(py::init([](std::uint64_t start, std::uint64_t number, std::uint64_t members) {
             return JointRound{start, number, members};
           }),
           py::arg("start") = 0, py::arg("number") = 0, py::arg("members") = 0);
  py::class_<RunPoint>(module, "RunPoint").def(py::init<>());
  py::class_<RunCommit>(module, "RunCommit").def_readonly("step", &RunCommit::step);
  module.def("commits_of_run", commits_of, py::arg("group"), py::arg("directories"), py::arg("run"), Released());
  module.def(
      "newest_joint_points",
      [](const std::vector<std::vector<RunCommit>>& runs, const std::vector<std::string>& names) {
        return newest_joint_points(runs, names);
      },
      py::arg("runs"), py::arg("names"));
}

}  // namespace

void bind_training(py::module_& module) {
  bind_joint_runs(module);
  bind_options(module);
  bind_result(module);
  module.attr("MAX_NOTE_BYTES") = max_note_bytes;
  module.def("require_run_name", &require_run_name, py::arg("run"));
  module.def("require_run_on_drives", &require_run_on_drives, py::arg("run"), py::kw_only(), py::arg("state"));
  py::native_enum<Moment> moments(module, "Moment", "enum.Enum");
  moments.value("momentum", Moment::momentum).value("variance", Moment::variance);
  for (std::size_t number = 0; number < max_own_values; ++number) {
    moments.value(("custom_" + std::to_string(number)).c_str(), own_value(number));
  }
  moments.finalize();
  py::class_<TrainingBinding> training(module, "Training");
  bind_life(training);
  bind_gradients(training);
  bind_step(module, training);
  bind_state(training);
}

}  // namespace ballast::python
