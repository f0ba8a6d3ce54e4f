// Trainings, for python/ballast/torch/, and runs that are resumed together.
#include <ballast/joint_runs.h>
#include <ballast/log.h>
#include <ballast/planner.h>
#include <ballast/tensor_state.h>

#include <pybind11/functional.h>
#include <pybind11/native_enum.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>

#include "python/bindings/group.h"
#include "python/bindings/step_options.h"
#include "zero/engine/exchange_order.h"
#include "zero/plan/compile.h"
#include "zero/runs/records.h"

namespace ballast::python {
namespace {

// A tile that an optimizer's own step updates.
struct TileToUpdate {
  std::size_t unit = 0;
  std::size_t first = 0;  // the first of the unit's elements
  Memory gradients{};
  DType gradient_dtype = DType::fp32;
  std::size_t count = 0;      // the number of elements
  Memory masters{};           // fp32 values
  std::vector<Memory> own{};  // values, in fp32
};

using AgreeInPython = std::function<void(bool failed)>;  // acquires Python's lock itself

AgreeOnMemory agree_in_python(const AgreeInPython& agree) {
  return [&agree](const std::exception_ptr& failure) {
    agree(failure != nullptr);
    if (failure) std::rethrow_exception(failure);
  };
}

// Returns the training, or its state.
template <class Object>
decltype(auto) as(Training& training) {
  if constexpr (std::is_same_v<Object, Training>) {
    return (training);
  } else {
    return Object(training);
  }
}

// A Training as Python uses it: memory by its address, and callbacks for values that torch holds. Keeps the groups that
// it trains in, and releases Python's lock while it works or waits. It decides nothing.
class TrainingBinding {
 public:
  // `norm_group` may be None.
  TrainingBinding(Model model, py::typing::Union<Group> group, py::typing::Optional<Group> norm_group,
                  std::vector<optim::Rule> rules, TrainingOptions options)
      : group_(std::move(group)), norm_group_(std::move(norm_group)), gpu_(options.gpu) {
    for (const py::object& group : {group_, norm_group_}) {
      if (!group.is_none()) groups_.push_back(&group.cast<Group&>());
    }
    Communicator& world = groups_.front()->communicator();
    options.drives.log = &log_;
    if (groups_.size() > 1) options.norm_group = &groups_.back()->communicator();
    const py::gil_scoped_release released;
    training_ = std::make_unique<Training>(std::move(model), world, std::move(rules), options);
  }

  // Calls `work` with the training, which works or waits: one thread at a time, and without Python's lock. Callbacks acquire it
  // themselves.
  template <class Work>
  auto working(const Work& work) {
    const OneThread::Working working(thread_);
    return work(*training_);
  }

  Training& training() const { return *training_; }  // any thread may call what only reads
  TrainingState state() const { return TrainingState(*training_); }
  const std::optional<int>& gpu() const { return gpu_; }

  // Returns the lines since the last call, with the numbers of Python's levels.
  std::vector<std::pair<int, std::string>> take_log() {
    const std::lock_guard lock(log_mutex_);
    return std::exchange(lines_, {});
  }

  // Acquires memory of one unit at a time, until it is released.
  template <class Object>
  const Lease& acquire(Lease (Object::*memory)(std::size_t unit), std::size_t unit) {
    const OneThread::Working working(thread_);
    return lease_.emplace((as<Object>(*training_).*memory)(unit));
  }

  void release() {
    const OneThread::Working working(thread_);
    lease_.reset();
  }

  // Rethrows what Python raises in the optimizer's own step, once; later calls can only report it.
  StepResult step(const StepOptions& options, const std::exception_ptr& raised) {
    const OneThread::Working working(thread_);
    try {
      StepResult result = training_->step(options);
      count_steps();
      return result;
    } catch (const Error&) {
      if (raised) std::rethrow_exception(raised);
      throw;
    }
  }

  StepResult step_prepared() {
    const OneThread::Working working(thread_);
    StepResult result = training_->step();
    count_steps();
    return result;
  }

  // Writes a range of a tensor's parameters to an address in host memory; false: they stay as they are.
  using Fill = std::function<bool(std::size_t unit, std::size_t tensor, std::size_t first, std::size_t count,
                                  std::uintptr_t into)>;

  void start(const Fill& fill) {
    const OneThread::Working working(thread_);
    training_->start([&](std::size_t unit, std::size_t tensor, Range range, const View& to) {
      fill(unit, tensor, range.first, range.count, reinterpret_cast<std::uintptr_t>(to.data()));
    });
    count_steps();
  }

  // Tells the groups, whose errors name the step of this rank.
  void count_steps() const {
    for (const Group* group : groups_)
      group->count_steps(training_->steps());
  }

 private:
  // Lines stay here until Python takes them, because threads that log must not wait for Python's lock.
  std::mutex log_mutex_;
  std::vector<std::pair<int, std::string>> lines_;
  Log log_{[this](Level level, std::string_view line) {
    const std::lock_guard lock(log_mutex_);
    lines_.emplace_back(10 * (static_cast<int>(level) + 1), line);
  }};
  OneThread thread_{
      "the training"};  // calls of the library's threads are exempt: wait_for_commit(), committed(), parts()
  py::object group_;
  py::object norm_group_;
  std::vector<Group*> groups_;  // both, if there are two
  std::optional<int> gpu_;
  std::unique_ptr<Training> training_;
  std::optional<Lease> lease_;
};

// --- Values for Python ---

// The function is freed with Python's lock, by whichever thread has it last.
std::shared_ptr<py::function> kept(py::function function) {
  return {new py::function(std::move(function)), [](const py::function* last) {
            const py::gil_scoped_acquire lock;
            delete last;
          }};
}

using JoinNotes = py::typing::Callable<py::bytes(py::typing::List<py::bytes>, py::typing::List<std::size_t>)>;

void set_join_notes(TrainingOptions& options, JoinNotes join) {
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

void set_before_write(TrainingOptions& options, py::typing::Callable<void(bool)> before) {
  options.drives.before_write = [before = kept(std::move(before))](RunWrite write) {
    const py::gil_scoped_acquire lock;
    (*before)(write == RunWrite::step);
  };
}

void bind_options(py::module_& module) {
  py::class_<ExchangeOrder, std::shared_ptr<ExchangeOrder>>(module, "ExchangeOrder").def(py::init<>());
  py::class_<TrainingOptions> type(module, "TrainingOptions");
  type.def(py::init([] { return TrainingOptions{.sums_micro_steps = true}; }),
           "A step adds gradients, as PyTorch does.");
  const auto option = binder(type);
  describe_step_options<TrainingOptions>(option);
  option("parameters", "the tiers of parameters", &TrainingOptions::parameters);
  option("gradients", "the tiers of gradients", &TrainingOptions::gradients);
  option("state", "the tiers of the optimizer's state", &TrainingOptions::state);
  option("threads", "of the CPU; 0: this rank's share of the cores that it may use", &TrainingOptions::threads);
  option("gpu", "whose memory the device tier is; None: the host's", &TrainingOptions::gpu);
  option("keeps_timeline", "of what ran when", &TrainingOptions::keeps_timeline);
  option("exchanges", "the order of exchanges between GPUs, which trainings share", &TrainingOptions::exchanges);
  option("max_norm", "to which gradients are clipped; infinite: none are", &TrainingOptions::max_norm);
  option("verify", "steps between two updates that are repeated; 0: never", &TrainingOptions::verify);
  constexpr auto drives = &TrainingOptions::drives;
  option("directories", "of one or several drives", drives, &RecordOptions::directories);
  option("run", "the name of a run that is kept", drives, &RecordOptions::run);
  option("mirror", "writes each record on a drive of another host's rank too", drives, &RecordOptions::mirror);
  option("begins_again", "where records of the run are missing or damaged", drives, &RecordOptions::begins_again);
  option("resume_at", "the commit from which runs are resumed together", drives, &RecordOptions::resume_at);
  type.def_property(
          "stream", [](const TrainingOptions& options) { return reinterpret_cast<std::uintptr_t>(options.stream); },
          [](TrainingOptions& options, std::uintptr_t stream) {
            options.stream = reinterpret_cast<StreamHandle>(stream);
          })
      .def(
          "set_rates",
          [](TrainingOptions& options, const Machine& machine) { options.rates = machine.transfer_rates(); },
          py::arg("machine"),
          "Share tiles whose state is on the host between the host and the GPU by the rates of this machine, as a plan for it does.")
      .def(
          "set_join_notes", &set_join_notes, py::arg("join"),
          "Set what makes the note of a run that other ranks began, from the notes of all of them and the place of each "
          "trained parameter in these.")
      .def(
          "set_before_write", &set_before_write, py::arg("before"),
          "Set the function that is called before records of a run are written. Its argument is true for a step, and false for a "
          "change between steps.");
}

void bind_result(py::module_& module) {
  readable<Metrics>(module, "StepMetrics", field("seconds", &Metrics::seconds), field("on_demand", &Metrics::on_demand),
                    field("repeated", &Metrics::repeated), field("repeat_seconds", &Metrics::repeat_seconds),
                    field("verified", &Metrics::verified), field("timed", &Metrics::timed),
                    field("sent_inside", &Metrics::sent_inside), field("sent_across", &Metrics::sent_across))
      .def_property_readonly("bytes", [](const Metrics& metrics) { return by_name<Lane>(metrics.bytes); })
      .def_property_readonly("busy", [](const Metrics& metrics) { return by_name<Lane>(metrics.busy); })
      .def_property_readonly("stalls", [](const Metrics& metrics) { return by_name<Lane>(metrics.stalls); })
      .def_property_readonly("exposed", [](const Metrics& metrics) { return by_name<Phase>(metrics.exposed); })
      .def_property_readonly("memory", [](const Metrics& metrics) { return by_name<Tier>(metrics.memory); });
  readable<Straggler>(module, "Straggler", field("slowest", &Straggler::slowest), field("seconds", &Straggler::seconds),
                      field("median", &Straggler::median), field("least", &Straggler::least));
  readable<StepResult>(module, "StepResult", field("skipped", &StepResult::skipped), field("norm", &StepResult::norm),
                       field("step", &StepResult::step), field("reason", &StepResult::reason),
                       field("metrics", &StepResult::metrics))
      .def_property_readonly(
          "straggler",
          [](const StepResult& result) {
            return result.straggler.seconds > 0.0 ? std::optional(result.straggler) : std::nullopt;
          },
          "None where the ranks do not know their own times.");
}

// Binds a function as it is, or a lambda that gets the training first. See TrainingBinding::working().
template <class Object, class Result, class... Arguments>
auto working(Result (Object::*method)(Arguments...)) {
  return [method](TrainingBinding& self, Arguments... arguments) {
    return self.working([&](Training& training) { return (as<Object>(training).*method)(arguments...); });
  };
}
template <class Work, class Result, class... Arguments>
auto working(const Work& work, Result (Work::*)(Training&, Arguments...) const) {
  return [work](TrainingBinding& self, Arguments... arguments) {
    return self.working([&](Training& training) { return work(training, arguments...); });
  };
}
template <class Work>
auto working(const Work& work) {
  return working(work, &Work::operator());
}

// Binds a function that only reads, and does not wait.
template <class Object, class Result, class... Arguments>
auto reading(Result (Object::*method)(Arguments...) const) {
  return [method](const TrainingBinding& self, Arguments... arguments) {
    return (as<Object>(self.training()).*method)(arguments...);
  };
}

// Returns memory that keeps the training alive. torch has no tensors that can only be read.
Memory memory_of(const py::object& training, const ConstView& view, bool on_gpu = true) {
  const std::optional<int>& gpu = training.cast<TrainingBinding&>().gpu();
  return {const_cast<std::byte*>(view.data()), view.bytes(), on_gpu ? gpu : std::nullopt, training};
}

// Binds a function that acquires parameters.
template <class Object>
auto acquiring(Lease (Object::*method)(std::size_t unit)) {
  return [method](const py::object& self, std::size_t unit) {
    return memory_of(self, self.cast<TrainingBinding&>().acquire(method, unit).parameters());
  };
}

using ShownTiles = py::typing::List<TileToUpdate>;

ShownTiles shown(const py::object& training, std::span<const SummedTile> tiles) {
  ShownTiles shown;
  for (const SummedTile& tile : tiles) {
    TileToUpdate shown_tile{.unit = tile.unit,
                            .first = tile.range.first,
                            .gradients = memory_of(training, tile.gradients, tile.gradients_on_gpu),
                            .gradient_dtype = tile.gradients.dtype(),
                            .count = tile.range.count,
                            .masters = memory_of(training, tile.masters, tile.masters_on_gpu)};
    for (std::size_t number = 0; number < tile.own.count; ++number) {
      const View values(reinterpret_cast<std::byte*>(tile.own.array(number)), tile.range.count, DType::fp32);
      shown_tile.own.push_back(memory_of(training, values, tile.masters_on_gpu));
    }
    shown.append(std::move(shown_tile));
  }
  return shown;
}

void bind_step(py::module_& module, py::class_<TrainingBinding>& training) {
  readable<TileToUpdate>(module, "TileToUpdate", field("unit", &TileToUpdate::unit),
                         field("first", &TileToUpdate::first), field("gradients", &TileToUpdate::gradients),
                         field("gradient_dtype", &TileToUpdate::gradient_dtype), field("count", &TileToUpdate::count),
                         field("masters", &TileToUpdate::masters), field("own", &TileToUpdate::own));
  training
      .def(
          "step",
          [](const py::object& self, const std::vector<optim::Rule>& rules, const std::vector<std::uint64_t>& missed,
             double loss_scale, bool discard,
             const py::typing::Optional<py::typing::Callable<void(ShownTiles, double, bool)>>& custom_step) {
            std::exception_ptr raised;
            const auto update = [&](const TilesToUpdate& turn) {
              const py::gil_scoped_acquire lock;
              try {
                custom_step(shown(self, turn.tiles), turn.gradient_factor, turn.is_last);
              } catch (const std::exception& error) {
                raised = std::current_exception();
                fail(Code::bad_argument, {.what = std::string("the optimizer's own step has failed: ") + error.what(),
                                          .needed = "a step() that raises nothing"});
              }
            };
            return self.cast<TrainingBinding&>().step(
                {.groups = rules,
                 .loss_scale = loss_scale,
                 .discard = discard,
                 .missed = missed,
                 .update = custom_step.is_none() ? TrainerUpdate() : TrainerUpdate(update)},
                raised);
          },
          py::kw_only(), py::arg("rules"), py::arg("missed"), py::arg("loss_scale"), py::arg("discard"),
          py::arg("custom_step") = py::none())
      .def("step_prepared", &TrainingBinding::step_prepared)
      .def("prepare",
           working(
               [](Training& training, const std::vector<optim::Rule>& rules, const std::vector<std::uint64_t>& missed) {
                 training.prepare({.groups = rules, .missed = missed});
               }),
           py::kw_only(), py::arg("rules"), py::arg("missed"))
      .def("expect",
           working([](Training& training, const std::vector<optim::Rule>& rules,
                      const std::vector<std::uint64_t>& missed) { training.expect(rules, missed); }),
           py::kw_only(), py::arg("rules"), py::arg("missed"))
      .def("leave_out", working(&Training::leave_out), py::arg("unit"), py::arg("tensor"));
}

void bind_gradients(py::class_<TrainingBinding>& training) {
  training
      .def(
          "acquire_gradients",
          [](const py::object& self, std::size_t unit) {
            return memory_of(self, self.cast<TrainingBinding&>().acquire(&Training::backward, unit).gradients());
          },
          py::arg("unit"))
      .def("gradient_norm",
           working([](Training& training, double loss_scale) { return training.gradient_norm(loss_scale); }),
           py::kw_only(), py::arg("loss_scale"))
      .def("tensor_norms", working([](Training& training, double loss_scale) {
             return TrainingState(training).tensor_norms(loss_scale);
           }),
           py::kw_only(), py::arg("loss_scale"))
      .def(
          "visit_gradients",
          [](const py::object& self, const py::typing::Callable<void(std::size_t, std::size_t, Memory, DType)>& visit) {
            const auto show = [&](std::size_t unit, std::size_t tensor, const View& gradients, bool on_gpu) {
              const py::gil_scoped_acquire lock;
              visit(unit, tensor, memory_of(self, gradients, on_gpu), gradients.dtype());
            };
            self.cast<TrainingBinding&>().working(
                [&](Training& training) { TrainingState(training).visit_gradients(show); });
          },
          py::arg("visit"));
}

void bind_life(py::class_<TrainingBinding>& training) {
  training
      .def(py::init<Model, py::typing::Union<Group>, py::typing::Optional<Group>, std::vector<optim::Rule>,
                    TrainingOptions>(),
           py::kw_only(), py::arg("model"), py::arg("group"), py::arg("norm_group"), py::arg("rules"),
           py::arg("options"))
      .def("take_log", &TrainingBinding::take_log)
      .def_property_readonly("found", reading(&Training::found),
                             "A run to resume: start() then requests frozen parameters only.")
      .def_property_readonly(
          "lost",
          [](const TrainingBinding& self) {
            const auto& lost = self.state().lost();
            return lost ? std::optional(std::pair(lost->reason, lost->step)) : std::nullopt;
          },
          "The reason why a run has begun again, and the newest step that it had; None if it has not.")
      .def("start", &TrainingBinding::start, py::arg("fill"))
      .def_property_readonly("steps", reading(&Training::steps))
      .def("wait_for_parameters", working(&TrainingState::wait_for_parameters), py::arg("unit"))
      .def(
          "wait_for_commit", [](TrainingBinding& self) { self.state().wait_for_commit(); }, Released())
      .def("finish", working(&Training::finish))
      .def("offload", working([](Training& training, bool parameters, const AgreeInPython& agree) {
             TrainingState(training).offload(parameters, agree_in_python(agree));
           }),
           py::kw_only(), py::arg("parameters"), py::arg("agree"))
      .def("reload", working([](Training& training, const AgreeInPython& agree) {
             TrainingState(training).reload(agree_in_python(agree));
           }),
           py::kw_only(), py::arg("agree"))
      .def("keep_gathered", working([](Training& training, std::size_t bytes, const AgreeInPython& agree) {
             TrainingState(training).keep_gathered(bytes, agree_in_python(agree));
           }),
           py::arg("bytes"), py::kw_only(), py::arg("agree"))
      .def_property_readonly("gathered_bytes", reading(&TrainingState::gathered_bytes));
}

void bind_parameters(py::class_<TrainingBinding>& training) {
  training
      .def(
          "tensor_begins",
          [](const TrainingBinding& self, std::size_t unit) {
            return compiled(self.training().plan()).layout().units.at(unit).tensor_begin;
          },
          py::arg("unit"))
      .def(
          "full_parameters",
          [](const py::object& self, std::size_t unit) {
            return memory_of(self, self.cast<TrainingBinding&>().state().full_parameters(unit));
          },
          py::arg("unit"))
      .def(
          "program", [](const TrainingBinding& self) { return self.state().program(); },
          "Return the program that runs now: one slot or operation a line.")
      .def("acquire_parameters", acquiring(&Training::forward), py::arg("unit"))
      .def("acquire_exact_parameters", acquiring(&TrainingState::exact_parameters), py::arg("unit"),
           "Gather exact ones even if gathers are encoded.")
      .def_property_readonly(
          "gathers_codes",
          [](const TrainingBinding& self) { return compiled(self.training().plan()).input().gathers_codes(); },
          "If false, acquire_parameters() gathers exact ones.")
      .def("release", &TrainingBinding::release)
      .def("take_full_parameters", working(&TensorState::take_full_parameters), py::arg("written"))
      .def("parameters_changed", working(&TrainingState::parameters_changed))
      .def("write_parameters", working([](Training& training, const TrainingBinding::Fill& fill) {
             TensorState(training).write_parameters(
                 [&](std::size_t unit, std::size_t tensor, Range range, std::byte* into) {
                   return fill(unit, tensor, range.first, range.count, reinterpret_cast<std::uintptr_t>(into));
                 });
           }),
           py::arg("fill"));
}

// The address of a moment of a full tensor, in fp32; 0: it stays as it is.
using MomentAddress = std::function<std::uintptr_t(std::size_t unit, std::size_t tensor, Moment moment)>;

// These calls come between steps: see TensorState.
void bind_state(py::class_<TrainingBinding>& training) {
  training
      .def(
          "parts",
          [](const TrainingBinding& self, std::size_t unit, std::size_t tensor) {
            std::vector<std::pair<std::size_t, std::size_t>> parts;  // ranges of the tensor's elements: first, count
            for (const Range& range : TensorState(self.training()).local_ranges(unit, tensor))
              parts.emplace_back(range.first, range.count);
            return parts;
          },
          py::arg("unit"), py::arg("tensor"))
      .def("read_moment",
           working([](Training& training, std::size_t unit, std::size_t tensor, Moment moment, std::uintptr_t into) {
             TensorState(training).read_moment(unit, tensor, moment, reinterpret_cast<float*>(into));
           }),
           py::arg("unit"), py::arg("tensor"), py::arg("moment"), py::kw_only(), py::arg("into"))
      .def("write_moments", working([](Training& training, const MomentAddress& address) {
             TensorState(training).write_moments([&](std::size_t unit, std::size_t tensor, Moment moment) {
               return reinterpret_cast<const float*>(address(unit, tensor, moment));
             });
           }),
           py::arg("address_of"))
      .def("kind", reading(&TensorState::chunk_kind), py::arg("unit"))
      .def("local_shards", reading(&TensorState::parts))
      .def("visit_shards",
           working([](Training& training, const TensorState::Visitor& visit,
                      const std::optional<TensorState::Filter>& which) {
             TensorState(training).visit(visit, which.value_or(nullptr));
           }),
           py::arg("visit"), py::arg("which") = py::none())
      .def("change_shards", working(&TensorState::change), py::arg("change"), py::arg("agree"));
}

void bind_commits(py::class_<TrainingBinding>& training) {
  training
      .def(
          "set_steps",
          [](TrainingBinding& self, std::uint64_t steps) {
            self.working([&](Training& training) { TrainingState(training).set_steps(steps); });
            self.count_steps();
          },
          py::arg("steps"))
      .def(
          "set_note",
          [](const TrainingBinding& self, const py::bytes& note) {
            const std::string_view bytes = note;
            self.training().set_note(std::as_bytes(std::span(bytes)));
          },
          py::arg("note"))
      .def("note",
           [](const TrainingBinding& self) {
             const std::vector<std::byte>& note = self.training().note();
             return py::bytes(reinterpret_cast<const char*>(note.data()), note.size());
           })
      .def_property_readonly(
          "committed",
          py::cpp_function([](const TrainingBinding& self) { return self.state().committed(); }, Released()))
      .def(
          "set_round", [](TrainingBinding& self, const JointRound& round) { self.state().set_round(round); },
          py::arg("round"))
      .def_property_readonly("unreserved_bytes", reading(&TrainingState::unreserved_bytes),
                             "Of parameters and state on a GPU, before start().")
      .def_property_readonly("unpinned_because", reading(&TrainingState::unpinned_because))
      .def(
          "ledger",
          [](const TrainingBinding& self, const std::pair<Tier, std::size_t>& own_state) {
            Ledger ledger = self.training().ledger();
            if (own_state.second > 0) ledger.push_back({own_state.first, "own state", own_state.second});
            return to_text(ledger);
          },
          py::arg("own_state"))
      .def("chrome_trace", [](TrainingBinding& self) {
        self.working([](Training& training) { training.finish(); });
        return self.training().chrome_trace();
      });
}

std::vector<RunCommit> commits_of(const Group& group, const std::vector<std::string>& directories,
                                  const std::string& run) {
  return commits_of_run(group.communicator(), {.directories = {directories.begin(), directories.end()}, .run = run});
}

void bind_joint_runs(py::module_& module) {
  record<JointRound>(module, "JointRound", preset("start", &JointRound::start), preset("number", &JointRound::number),
                     preset("members", &JointRound::members));
  py::class_<RunPoint>(module, "RunPoint").def(py::init<>());
  readable<RunCommit>(module, "RunCommit", field("step", &RunCommit::step));
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
  module.def("require_clipping", &require_clipping, py::kw_only(), py::arg("update_in_backward"), py::arg("max_norm"));
  module.def("require_run_on_drives", &require_run_on_drives, py::arg("run"), py::kw_only(), py::arg("state"));
  py::native_enum<Moment> moments(module, "Moment", "enum.Enum");
  moments.value("momentum", Moment::momentum).value("variance", Moment::variance);
  for (std::size_t number = 0; number < max_own_values; ++number) {
    moments.value(("custom_" + std::to_string(number)).c_str(), own_value(number));
  }
  moments.finalize();
  py::class_<TrainingBinding> training(module, "Training");
  bind_life(training);
  bind_parameters(training);
  bind_gradients(training);
  bind_step(module, training);
  bind_state(training);
  bind_commits(training);
}

}  // namespace ballast::python
