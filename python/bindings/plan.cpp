// Questions to the planner, a model on a machine, real or imagined, and its answers. (this_machine.cpp has the machine on which
// this process runs.)
#include <ballast/error.h>
#include <ballast/optim.h>
#include <ballast/planner.h>

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "python/bindings/step_options.h"
#include "zero/plan/compile.h"
#include "zero/plan/layout.h"
#include "zero/plan/program_cost.h"
#include "zero/plan/simulate.h"

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

const ChoiceInput& complete(const ChoiceInput& question) {
  require(question.work.size() == question.model.units.size(), Code::wrong_size,
          [] { return Problem{.what = "the work of each unit is needed", .needed = "one entry for each unit"}; });
  return question;
}

CompiledPlan compiled(const ChoiceInput& question, const Placement& placement, std::size_t rank) {
  return CompiledPlan(question.model, options_of(question, placement, rank));
}

// The elements of each tensor whose state a rank keeps, by unit; none of frozen tensors.
std::vector<std::vector<std::size_t>> kept_elements(const ChoiceInput& question, const Placement& placement,
                                                    std::size_t rank) {
  const std::vector<Unit>& units = question.model.units;
  const Layout layout = lay_out(question.model, placement, question.tile_elements);
  std::vector<std::vector<std::size_t>> kept;
  for (std::size_t i = 0; i < units.size(); ++i) {
    const Section& trained = layout.units[i].trained;
    auto& unit_elements = kept.emplace_back(units[i].tensors.size());
    for (const TensorPart& part :
         tensors_in(units[i], layout.units[i], trained, rank % placement.shards, {0, trained.shard})) {
      unit_elements[part.tensor] = part.range.count;
    }
  }
  return kept;
}

std::string program(const ChoiceInput& question, const Placement& placement, std::size_t rank) {
  std::string text = to_text(compiled(question, placement, rank).program());
  if (question.other_optimizer) text += "\n" + to_text(compiled(*question.other_optimizer, placement, rank).program());
  return text;
}

void append_timeline(const ChoiceInput& question, const Placement& placement, double begin,
                     std::vector<TimelineEntry>& entries) {
  const CompiledPlan plan = compiled(question, placement, 0);
  const Program simulated = with_activations(plan.program(), question.work, question.activations);
  const SimulationInput input{simulated, placement, question.machine, question.work, question.waits_for_updates};
  for (const SimulatedOp& ran : timeline_of(input)) {
    const Op& op = simulated.ops[ran.op];
    entries.push_back({.lane = op.lane,
                       .phase = op.phase,
                       .kind = std::string(name(op.kind)),
                       .unit = op.unit == none ? "" : question.model.units[op.unit].name,
                       .of_earlier_step = ran.is_earlier_steps,
                       .begin = begin + ran.begin,
                       .end = begin + ran.end});
  }
}

// The step of others comes after this one.
std::vector<TimelineEntry> timeline(const ChoiceInput& question, const Placement& placement) {
  ChoiceInput alone = question;
  const auto other = std::exchange(alone.other_optimizer, nullptr);
  std::vector<TimelineEntry> entries;
  append_timeline(alone, placement, 0, entries);
  if (other) append_timeline(*other, placement, price(alone, placement).simulation.seconds, entries);
  return entries;
}

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

void set_optimizer(ChoiceInput& question, const std::string& name) {
  question.names = state_of(name);
  question.orthogonalization_steps.reset();
  if (name == "muon") question.orthogonalization_steps = optim::orthogonalization_steps(optim::Muon{});
}

void set_rule(ChoiceInput& question, const optim::Rule& rule) {
  question.names = optim::state_names(rule);
  question.orthogonalization_steps = optim::orthogonalization_steps(rule);
}

using Seconds = std::vector<std::pair<double, double>>;  // forward and backward of each unit

void set_work(ChoiceInput& question, const Seconds& seconds) {
  question.work.clear();
  for (const auto& [forward, backward] : seconds) {
    question.work.push_back({forward, backward});
  }
}

void set_activations(ChoiceInput& question, Tier tier, const std::vector<std::size_t>& bytes) {
  require(bytes.size() == question.work.size(), Code::wrong_size,
          [] { return Problem{.what = "the activations of each unit are needed", .needed = "set_work() before"}; });
  question.activations = tier;
  for (std::size_t unit = 0; unit < bytes.size(); ++unit) {
    question.work[unit].offloaded_bytes = bytes[unit];
  }
}

// Binds a question to the planner.
template <class Answer, class... Arguments>
auto answering(Answer (*answer)(const ChoiceInput&, Arguments...)) {
  return [answer](const ChoiceInput& question, Arguments... arguments) {
    const py::gil_scoped_release released;
    return answer(complete(question), arguments...);
  };
}

template <std::size_t tier>
void bind_bytes(py::class_<Machine>& type, const char* name) {
  type.def_property(
      name, [](const Machine& machine) { return machine.bytes[tier]; },
      [](Machine& machine, std::size_t bytes) { machine.bytes[tier] = bytes; });
}

void bind_machine(py::module_& module) {
  py::class_<Machine> machine(module, "Machine");
  machine.def(py::init<>())
      .def("__copy__", [](const Machine& other) { return other; })
      .def_readwrite("gather", &Machine::gather)
      .def_readwrite("reduce", &Machine::reduce)
      .def_readwrite("across", &Machine::across)
      .def_readwrite("ranks_per_host", &Machine::ranks_per_host)
      .def_readwrite("upload", &Machine::upload)
      .def_readwrite("shared", &Machine::shared)
      .def_readwrite("download", &Machine::download)
      .def_readwrite("read", &Machine::read)
      .def_readwrite("write", &Machine::write)
      .def_readwrite("device_memory", &Machine::device_memory)
      .def_readwrite("host_memory", &Machine::host_memory)
      .def_readwrite("device_updates", &Machine::device_updates)
      .def_readwrite("host_updates", &Machine::host_updates)
      .def_readwrite("products", &Machine::products)
      .def_readwrite("shares_cores", &Machine::shares_cores)
      .def_readwrite("host_is_device", &Machine::host_is_device)
      .def_readwrite("one_pool", &Machine::one_pool);
  bind_bytes<0>(machine, "device_bytes");
  bind_bytes<1>(machine, "host_bytes");
  bind_bytes<2>(machine, "nvme_bytes");
}

// The answers of a plan: memory by tier and owner, time by phase and lane.
void bind_answers(py::module_& module) {
  readable<LedgerEntry>(module, "LedgerEntry", field("tier", &LedgerEntry::tier), field("owner", &LedgerEntry::owner),
                        field("bytes", &LedgerEntry::bytes));
  readable<Simulation>(module, "Simulation", field("seconds", &Simulation::seconds))
      .def_property_readonly("exposed", [](const Simulation& s) { return by_name<Phase>(s.exposed); })
      .def_property_readonly("critical", [](const Simulation& s) { return by_name<Lane>(s.critical); });
  readable<Choice>(module, "Choice", field("placement", &Choice::placement), field("ledger", &Choice::ledger),
                   field("simulation", &Choice::simulation));
  readable<TimelineEntry>(module, "TimelineEntry", field("lane", &TimelineEntry::lane),
                          field("phase", &TimelineEntry::phase), field("kind", &TimelineEntry::kind),
                          field("unit", &TimelineEntry::unit),
                          field("of_earlier_step", &TimelineEntry::of_earlier_step),
                          field("begin", &TimelineEntry::begin), field("end", &TimelineEntry::end));
}

}  // namespace

void bind_plan(py::module_& module) {
  bind_machine(module);
  bind_answers(module);
  module.def("optimizers", optimizer_names, "The update rules, by name.");
  py::class_<ChoiceInput, std::shared_ptr<ChoiceInput>> type(module, "Question");
  const auto option = binder(type);
  describe_step_options<ChoiceInput>(option);
  option("ranks", "of the training", &ChoiceInput::ranks);
  option("micro_steps", "backward passes of a step", &ChoiceInput::micro_steps);
  option("full_records", "records hold parameters too", &ChoiceInput::full_records);
  option("waits_for_updates", "no step begins before the updates of the last one", &ChoiceInput::waits_for_updates);
  type.def(py::init([](Model model, const Machine& machine) {
             return ChoiceInput{.model = std::move(model), .machine = machine, .work = {}};
           }),
           py::arg("model"), py::arg("machine"))
      .def("__copy__", [](const ChoiceInput& other) { return other; })
      .def_readwrite("model", &ChoiceInput::model)
      .def("set_optimizer", set_optimizer, py::arg("name"))
      .def("set_rule", set_rule, py::arg("rule"), "Instead of an optimizer's name.")
      .def("set_work", set_work, py::arg("seconds"), "Forward and backward of each unit.")
      .def(
          "set_other",
          [](ChoiceInput& question, const std::shared_ptr<ChoiceInput>& other) {
            if (other) complete(*other);
            question.other_optimizer = other;
          },
          py::arg("other").none(true),
          "The question about parameters that another optimizer has, whose step comes after this one; None: all are in this one.")
      .def("set_activations", set_activations, py::arg("tier"), py::arg("bytes"),
           "Of each unit, that leave the device after forward and return for backward.")
      .def("choose", answering(&choose))
      .def("price", answering(&price), py::arg("placement"))
      .def("placements", answering(&pure_placements))
      .def("memory", answering(&ballast::memory_of), py::arg("placement"))
      .def(
          "needs",
          [](const ChoiceInput& question, const Placement& placement) {
            return by_name<Tier>(needs(answering(&ballast::memory_of)(question, placement), question.machine));
          },
          py::arg("placement"), "Return the bytes that it needs, by tier.")
      .def("kept_elements", &kept_elements, py::arg("placement"), py::kw_only(), py::arg("rank"), Released())
      .def("program", answering(&program), py::arg("placement"), py::kw_only(), py::arg("rank") = 0)
      .def("timeline", answering(&timeline), py::arg("placement"),
           "Return the operations of the simulated step, with their times.");
}

}  // namespace ballast::python
