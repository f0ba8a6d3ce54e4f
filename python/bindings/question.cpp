// Questions to the planner, a model on a machine, and its answers.
#include <ballast/error.h>
#include <ballast/optim.h>
#include <ballast/planner.h>

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "python/bindings/by_name.h"
#include "zero/plan/activation_traffic.h"
#include "zero/plan/compiled_plan.h"
#include "zero/plan/simulate.h"
#include "zero/plan/tiling.h"

namespace ballast::python {
namespace {

// An operation of a simulated step, by names.
struct TimelineEntry {
  Lane lane = Lane::compute;
  Phase phase = Phase::step;
  std::string kind;
  std::string unit;  // empty: of no unit
  bool of_earlier_step = false;
  double begin = 0;  // seconds from the beginning of the trainer's step
  double end = 0;
};

// Parameters of a model that another optimizer has.
struct Others {
  Model model;
  optim::StateNames names{};
  std::vector<UnitWork> work;  // by unit
};

// A ChoiceInput with the objects that it refers to.
struct Question {
  Model model;
  Machine machine;
  std::vector<UnitWork> work;  // by unit
  std::optional<Others> others{};
  std::size_t ranks = 1;
  std::optional<int> stage{};
  std::size_t parameter_replicas = 1;
  StateFormat format = StateFormat::split;
  GradientFormat gradient_format = GradientFormat::fp32;
  optim::StateNames names{};
  std::optional<std::size_t> orthogonalization_steps{};
  std::size_t tile_elements = 0;  // 0: the library chooses
  std::size_t micro_steps = 1;
  Schedule schedule{};
  Wire wire{};
  std::vector<std::size_t> backward_order{};  // of units, which are not used forward; else in order of declaration
  bool full_records = false;
  Tier activations = Tier::device;

  ChoiceInput input() const {
    ChoiceInput input = input_of(model, work);
    if (!others) return input;
    auto other = std::make_shared<ChoiceInput>(input_of(others->model, others->work));
    other->names = others->names;
    other->orthogonalization_steps.reset();
    other->trace.clear();
    input.other_optimizer = std::move(other);
    return input;
  }

  ChoiceInput input_of(const Model& model, const std::vector<UnitWork>& work) const {
    require(work.size() == model.units.size(), Code::wrong_size,
            [] { return Problem{.what = "the work of each unit is needed", .needed = "one entry for each unit"}; });
    return {.model = model,
            .machine = machine,
            .work = work,
            .ranks = ranks,
            .stage = stage,
            .parameter_replicas = parameter_replicas,
            .format = format,
            .gradient_format = gradient_format,
            .names = names,
            .orthogonalization_steps = orthogonalization_steps,
            .tile_elements = tile_elements,
            .micro_steps = micro_steps,
            .schedule = schedule,
            .wire = wire,
            .trace = trace(),
            .full_records = full_records,
            .activations = activations};
  }

  Trace trace() const {
    Trace trace;
    for (const std::size_t unit : backward_order)
      trace.push_back({unit, Phase::backward});
    return trace;
  }

  Choice price_of(const Placement& placement) const { return price(input(), placement); }
  Choice best() const { return choose(input()); }
  std::vector<Placement> placements() const { return pure_placements(input()); }
  Ledger memory(const Placement& placement) const { return memory_of(input(), placement); }
  TierBytes needs_of(const Placement& placement) const { return needs(memory(placement), machine); }

  // The elements of each tensor whose state a rank keeps, by unit; none of frozen tensors.
  std::vector<std::vector<std::size_t>> kept_elements(const Placement& placement, std::size_t rank) const {
    const Layout layout = lay_out(model, placement, tile_elements);
    std::vector<std::vector<std::size_t>> kept;
    for (std::size_t i = 0; i < model.units.size(); ++i) {
      const Section& trained = layout.units[i].trained;
      auto& of_unit = kept.emplace_back(model.units[i].tensors.size());
      for (const TensorPart& part :
           tensors_in(model.units[i], layout.units[i], trained, rank % placement.shards, {0, trained.shard})) {
        of_unit[part.tensor] = part.range.count;
      }
    }
    return kept;
  }

  std::string program(const Placement& placement, std::size_t rank) const {
    const ChoiceInput asked = input();
    std::string text = to_text(compiled(asked, placement, rank).program());
    if (asked.other_optimizer) text += "\n" + to_text(compiled(*asked.other_optimizer, placement, rank).program());
    return text;
  }

  // The step of others comes after this one.
  std::vector<TimelineEntry> timeline(const Placement& placement) const {
    ChoiceInput asked = input();
    const auto other = std::exchange(asked.other_optimizer, nullptr);
    std::vector<TimelineEntry> entries;
    append_timeline(asked, placement, 0, entries);
    if (other) append_timeline(*other, placement, price(asked, placement).simulation.seconds, entries);
    return entries;
  }

 private:
  static CompiledPlan compiled(const ChoiceInput& asked, const Placement& placement, std::size_t rank) {
    return CompiledPlan(asked.model, {.placement = placement,
                                      .rank = rank,
                                      .ranks_per_host = asked.machine.ranks_per_host,
                                      .tile_elements = asked.tile_elements,
                                      .micro_steps = asked.micro_steps,
                                      .format = asked.format,
                                      .gradient_format = asked.gradient_format,
                                      .names = asked.names,
                                      .orthogonalization_steps = asked.orthogonalization_steps,
                                      .trace = asked.trace,
                                      .schedule = asked.schedule,
                                      .wire = asked.wire,
                                      .full_records = asked.full_records,
                                      .host_is_device = asked.machine.host_is_device});
  }

  static void append_timeline(const ChoiceInput& asked, const Placement& placement, double begin,
                              std::vector<TimelineEntry>& entries) {
    const CompiledPlan plan = compiled(asked, placement, 0);
    const Program simulated = with_activations(plan.program(), asked.work, asked.activations);
    for (const SimulatedOp& ran : timeline_of({simulated, placement, asked.machine, asked.work})) {
      const Op& op = simulated.ops[ran.op];
      entries.push_back({.lane = op.lane,
                         .phase = op.phase,
                         .kind = std::string(name(op.kind)),
                         .unit = op.unit == none ? "" : asked.model.units[op.unit].name,
                         .of_earlier_step = ran.of_earlier_step,
                         .begin = begin + ran.begin,
                         .end = begin + ran.end});
    }
  }
};

template <class Rule>
constexpr std::pair<const char*, optim::StateNames> row(const char* name) {
  return {name, Rule::state};
}

constexpr std::array optimizers{row<optim::AdamW>("adamw"),     row<optim::Adam>("adam"),
                                row<optim::Lion>("lion"),       row<optim::SgdMomentum>("sgd_momentum"),
                                row<optim::Adagrad>("adagrad"), row<optim::Sgd>("sgd"),
                                row<optim::Muon>("muon")};

std::vector<std::string> optimizer_names() {
  std::vector<std::string> names;
  names.reserve(optimizers.size());
  for (const auto& optimizer : optimizers) {
    names.emplace_back(optimizer.first);
  }
  return names;
}

optim::StateNames state_of(const std::string& name) {
  const auto* found = std::ranges::find(optimizers, name, [](const auto& row) { return std::string_view(row.first); });
  require(found != optimizers.end(), Code::bad_argument,
          [&] { return Problem{.what = "no optimizer is called " + name, .needed = "a name in _core.optimizers()"}; });
  return found->second;
}

void set_optimizer(Question& question, const std::string& name) {
  question.names = state_of(name);
  question.orthogonalization_steps.reset();
  if (name == "muon") question.orthogonalization_steps = optim::orthogonalization_steps(optim::Muon{});
}

void set_rule(Question& question, const optim::Rule& rule) {
  question.names = optim::state_names(rule);
  question.orthogonalization_steps = optim::orthogonalization_steps(rule);
}

using Seconds = std::vector<std::pair<double, double>>;  // forward and backward of each unit

std::vector<UnitWork> work_of(const Seconds& seconds) {
  std::vector<UnitWork> work;
  work.reserve(seconds.size());
  for (const auto& [forward, backward] : seconds) {
    work.push_back({forward, backward});
  }
  return work;
}

void set_others(Question& question, const Model& model, const std::string& optimizer, const Seconds& seconds) {
  question.others = Others{model, state_of(optimizer), work_of(seconds)};
}

void set_activations(Question& question, Tier tier, const std::vector<std::size_t>& bytes) {
  require(bytes.size() == question.work.size(), Code::wrong_size,
          [] { return Problem{.what = "the activations of each unit are needed", .needed = "set_work() before"}; });
  question.activations = tier;
  for (std::size_t unit = 0; unit < bytes.size(); ++unit) {
    question.work[unit].offloaded_bytes = bytes[unit];
  }
}

void bind_timeline(py::module_& module) {
  py::class_<TimelineEntry>(module, "TimelineEntry")
      .def_readonly("lane", &TimelineEntry::lane)
      .def_readonly("phase", &TimelineEntry::phase)
      .def_readonly("kind", &TimelineEntry::kind)
      .def_readonly("unit", &TimelineEntry::unit)
      .def_readonly("of_earlier_step", &TimelineEntry::of_earlier_step)
      .def_readonly("begin", &TimelineEntry::begin)
      .def_readonly("end", &TimelineEntry::end);
}

using Released = py::call_guard<py::gil_scoped_release>;

}  // namespace

void bind_question(py::module_& module) {
  module.def("optimizers", optimizer_names, "The update rules, by name.");
  py::class_<Schedule>(module, "Schedule")
      .def(py::init<>())
      .def_readwrite("prefetch", &Schedule::prefetch)
      .def_readwrite("gathered_bytes", &Schedule::gathered_bytes)
      .def_readwrite("staging_slots", &Schedule::staging_slots)
      .def_readwrite("kept_records", &Schedule::kept_records)
      .def_readwrite("update_in_backward", &Schedule::update_in_backward);
  py::class_<Choice>(module, "Choice")
      .def_readonly("placement", &Choice::placement)
      .def_readonly("ledger", &Choice::ledger)
      .def_readonly("simulation", &Choice::simulation);
  bind_timeline(module);
  py::class_<Question>(module, "Question")
      .def(py::init([](const Model& model, const Machine& machine) {
             return Question{model, machine, {}};
           }),
           py::arg("model"), py::arg("machine"))
      .def_readonly("model", &Question::model)
      .def_readwrite("ranks", &Question::ranks)
      .def_readwrite("stage", &Question::stage)
      .def_readwrite("parameter_replicas", &Question::parameter_replicas)
      .def_readwrite("format", &Question::format)
      .def_readwrite("gradient_format", &Question::gradient_format)
      .def_readwrite("tile_elements", &Question::tile_elements)
      .def_readwrite("micro_steps", &Question::micro_steps)
      .def_readwrite("schedule", &Question::schedule)
      .def_readwrite("wire", &Question::wire)
      .def("set_optimizer", set_optimizer, py::arg("name"))
      .def_readwrite("backward_order", &Question::backward_order)
      .def_readwrite("full_records", &Question::full_records)
      .def("set_rule", set_rule, py::arg("rule"), "Instead of an optimizer's name.")
      .def(
          "set_work", [](Question& self, const Seconds& seconds) { self.work = work_of(seconds); }, py::arg("seconds"),
          "Forward and backward of each unit.")
      .def("set_others", set_others, py::arg("model"), py::arg("optimizer"), py::arg("seconds"),
           "Parameters that another optimizer has, whose step comes after this one.")
      .def("set_activations", set_activations, py::arg("tier"), py::arg("bytes"),
           "Of each unit, that leave the device after forward and return for backward.")
      .def("choose", &Question::best, Released())
      .def("price", &Question::price_of, py::arg("placement"), Released())
      .def("placements", &Question::placements, Released())
      .def("memory", &Question::memory, py::arg("placement"), Released())
      .def(
          "needs",
          [](const Question& self, const Placement& placement) {
            TierBytes bytes{};
            {
              const py::gil_scoped_release released;
              bytes = self.needs_of(placement);
            }
            return by_name<Tier>(bytes);
          },
          py::arg("placement"), "Return the bytes that it needs, by tier.")
      .def("kept_elements", &Question::kept_elements, py::arg("placement"), py::kw_only(), py::arg("rank"), Released())
      .def("program", &Question::program, py::arg("placement"), py::kw_only(), py::arg("rank") = 0, Released())
      .def("timeline", &Question::timeline, py::arg("placement"), Released(),
           "Return the operations of the simulated step, with their times.");
}

}  // namespace ballast::python
