#include "python/bindings/training.h"

#include <pybind11/functional.h>
#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include "kernels/state_access.h"
#include "python/bindings/by_name.h"

namespace ballast::python {
namespace {

struct Options {
  int stage = 0;
  Spread parameters{};
  Spread gradients{};
  Spread state{};
  std::vector<std::filesystem::path> directories{};
  std::string run;
  kernels::StateFormat format = kernels::StateFormat::fp32;
  std::size_t tile_elements = 0;
  std::vector<std::size_t> backward_order{};  // of units, which are not lent forward; else in order of declaration
  bool update_in_backward = false;
  double max_norm = optim::no_clipping;
  int threads = 0;
  std::optional<int> gpu{};
  std::uintptr_t stream = 0;
  bool keeps_timeline = false;
};

TrainingOptions training_options(const Options& asked) {
  TrainingOptions options{.stage = asked.stage,
                          .parameters = asked.parameters,
                          .gradients = asked.gradients,
                          .state = asked.state,
                          .drives = {.directories = asked.directories, .run = asked.run},
                          .format = asked.format,
                          .schedule = {.update_in_backward = asked.update_in_backward},
                          .max_norm = asked.max_norm,
                          .keeps_timeline = asked.keeps_timeline,
                          .threads = asked.threads,
                          .gpu = asked.gpu,
                          .stream = reinterpret_cast<StreamHandle>(asked.stream)};
  if (asked.tile_elements > 0) options.tile_elements = asked.tile_elements;
  for (const std::size_t unit : asked.backward_order)
    options.trace.push_back({unit, Phase::backward});
  return options;
}

// Keeps the group that it trains in, and lets Python's other threads run while it works or waits.
class Session {
 public:
  Session(Model model, py::object group, std::vector<optim::Rule> rules, const Options& asked)
      : group_(std::move(group)), gpu_(asked.gpu) {
    Communicator& world = group_.cast<Group&>().communicator();
    const py::gil_scoped_release released;
    training_.emplace(std::move(model), world, std::move(rules), training_options(asked));
  }

  Training& training() { return *training_; }
  bool found() const { return training_->found(); }

  void start(const AddressOf& address) {
    const py::gil_scoped_release released;
    training_->start([&](std::size_t unit, std::size_t tensor, Range range, const View& to) {
      const auto* const from = reinterpret_cast<const std::byte*>(address(unit, tensor));  // takes Python's lock itself
      std::memcpy(to.data(), from + range.first * byte_size(to.dtype()), to.bytes());
    });
  }

  Memory lend(std::size_t unit, Phase phase) {
    const py::gil_scoped_release released;
    lease_.emplace(phase == Phase::forward ? training_->forward(unit) : training_->backward(unit));
    const View lent = lease_->gradients();
    return {lent.data(), lent.bytes(), gpu_, {}};
  }
  void give_back() {
    const py::gil_scoped_release released;
    lease_.reset();
  }

  StepResult step(const std::vector<optim::Rule>& rules, double max_norm, double loss_scale, bool discard,
                  const std::vector<std::uint64_t>& begun_at) {
    const py::gil_scoped_release released;
    return training_->engine().step({rules, max_norm, loss_scale, discard, begun_at});
  }

  template <class Call>
  auto call(Call&& body) {
    const py::gil_scoped_release released;
    return body(*training_);
  }

 private:
  py::object group_;
  std::optional<int> gpu_;
  std::optional<Training> training_;
  std::optional<Lease> lease_;
};

py::dict metrics_of(const Metrics& metrics) {
  py::dict named;
  named["seconds"] = metrics.seconds;
  named["on_demand"] = metrics.on_demand;
  named["bytes"] = by_name<Lane>(metrics.bytes);
  named["busy"] = by_name<Lane>(metrics.busy);
  named["stalls"] = by_name<Lane>(metrics.stalls);
  named["exposed"] = by_name<Phase>(metrics.exposed);
  named["memory"] = by_name<Tier>(metrics.memory);
  return named;
}

Memory owned(Memory memory, py::object owner) {
  memory.owner = std::move(owner);
  return memory;
}

void bind_memory(py::module_& module) {
  py::class_<Memory>(module, "Memory", py::buffer_protocol())
      .def_property_readonly("address",
                             [](const Memory& memory) { return reinterpret_cast<std::uintptr_t>(memory.data); })
      .def_readonly("bytes", &Memory::bytes)
      .def_readonly("gpu", &Memory::gpu)
      .def_buffer([](Memory& memory) {
        require(!memory.gpu, Code::bad_argument,
                [] { return Problem{.what = "memory of a GPU was asked for as the host's"}; });
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(memory.data), static_cast<py::ssize_t>(memory.bytes));
      });
}

void bind_options(py::module_& module) {
  py::class_<Options>(module, "TrainingOptions")
      .def(py::init<>())
      .def_readwrite("stage", &Options::stage)
      .def_readwrite("parameters", &Options::parameters)
      .def_readwrite("gradients", &Options::gradients)
      .def_readwrite("state", &Options::state)
      .def_property(
          "directories",
          [](const Options& options) {
            return std::vector<std::string>(options.directories.begin(), options.directories.end());
          },
          [](Options& options, const std::vector<std::string>& paths) {
            options.directories.assign(paths.begin(), paths.end());
          })
      .def_readwrite("run", &Options::run)
      .def_readwrite("format", &Options::format)
      .def_readwrite("tile_elements", &Options::tile_elements)
      .def_readwrite("backward_order", &Options::backward_order)
      .def_readwrite("update_in_backward", &Options::update_in_backward)
      .def_readwrite("max_norm", &Options::max_norm)
      .def_readwrite("threads", &Options::threads)
      .def_readwrite("gpu", &Options::gpu)
      .def_readwrite("stream", &Options::stream)
      .def_readwrite("keeps_timeline", &Options::keeps_timeline);
}

void bind_result(py::module_& module) {
  py::class_<StepResult>(module, "StepResult")
      .def_readonly("skipped", &StepResult::skipped)
      .def_readonly("norm", &StepResult::norm)
      .def_readonly("step", &StepResult::step)
      .def_readonly("reason", &StepResult::reason)
      .def_property_readonly("metrics", [](const StepResult& result) { return metrics_of(result.metrics); })
      .def_property_readonly("pace", [](const StepResult& result) { return to_text(result.pace); });
}

}  // namespace

void bind_training(py::module_& module) {
  bind_memory(module);
  bind_options(module);
  bind_result(module);
  py::native_enum<kernels::Moment>(module, "Moment", "enum.Enum")
      .value("momentum", kernels::Moment::momentum)
      .value("variance", kernels::Moment::variance)
      .finalize();
  using kernels::Moment;
  py::class_<Session>(module, "Training")
      .def(py::init<Model, py::object, std::vector<optim::Rule>, const Options&>(), py::kw_only(), py::arg("model"),
           py::arg("group"), py::arg("rules"), py::arg("options"))
      .def_property_readonly("found", &Session::found)
      .def("start", &Session::start, py::arg("address_of"))
      .def(
          "tensor_begins",
          [](Session& session, std::size_t unit) {
            return session.training().plan().layout().units.at(unit).tensor_begin;
          },
          py::arg("unit"))
      .def(
          "whole_parameters",
          [](py::object self, std::size_t unit) {
            const View view = self.cast<Session&>().training().engine().whole_parameters(unit);
            return owned({view.data(), view.bytes(), {}, {}}, self);
          },
          py::arg("unit"))
      .def(
          "lend_gradients",
          [](py::object self, std::size_t unit) {
            return owned(self.cast<Session&>().lend(unit, Phase::backward), self);
          },
          py::arg("unit"))
      .def("give_back", &Session::give_back)
      .def("step", &Session::step, py::kw_only(), py::arg("rules"), py::arg("max_norm"), py::arg("loss_scale"),
           py::arg("discard"), py::arg("begun_at"))
      .def("finish", [](Session& session) { session.call([](Training& training) { training.engine().finish(); }); })
      .def(
          "gradient_norm",
          [](Session& session, double loss_scale) {
            return session.call([&](Training& training) { return training.engine().gradient_norm(loss_scale); });
          },
          py::arg("loss_scale"))
      .def(
          "tensor_norms",
          [](Session& session, double loss_scale) {
            return session.call([&](Training& training) { return training.engine().tensor_norms(loss_scale); });
          },
          py::arg("loss_scale"))
      .def(
          "parts",
          [](Session& session, std::size_t unit, std::size_t tensor) {
            return parts_of(session.training(), unit, tensor);
          },
          py::arg("unit"), py::arg("tensor"))
      .def(
          "read_moment",
          [](Session& session, std::size_t unit, std::size_t tensor, Moment moment, std::uintptr_t into) {
            session.call([&](Training& training) {
              read_moment(training, {unit, tensor, moment}, reinterpret_cast<float*>(into));
            });
          },
          py::arg("unit"), py::arg("tensor"), py::arg("moment"), py::kw_only(), py::arg("into"))
      .def(
          "write_moments",
          [](Session& session, const std::function<std::uintptr_t(std::size_t, std::size_t, Moment)>& address) {
            session.call([&](Training& training) {
              write_moments(training,
                            [&](const MomentPlace& place) { return address(place.unit, place.tensor, place.moment); });
            });
          },
          py::arg("address_of"))
      .def("take_whole_parameters", [](Session& session) { session.call(take_whole_parameters); })
      .def(
          "continue_from",
          [](Session& session, std::uint64_t steps) { session.training().engine().continue_from(steps); },
          py::arg("steps"))
      .def_property_readonly("steps", [](Session& session) { return session.training().steps(); })
      .def_property_readonly("metrics",
                             [](Session& session) { return metrics_of(session.training().engine().metrics()); })
      .def("ledger", [](Session& session) { return to_text(session.training().ledger()); })
      .def("chrome_trace", [](Session& session) {
        return session.call([](Training& training) {
          training.engine().finish();
          return training.chrome_trace();
        });
      });
}

}  // namespace ballast::python
