// Checks the options of a training before anything is reserved, and compiles them to its program.
#include <ballast/error.h>
#include <ballast/training.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "optim/step.h"
#include "zero/plan/compile.h"
#include "zero/plan/names_in_files.h"
#include "zero/plan/program_cost.h"
#include "zero/plan/simulate.h"
#include "zero/runs/records.h"

namespace ballast {
namespace {

Placement placement_of(const TrainingOptions& options, std::size_t ranks) {
  require(options.replicas > 0 && ranks % options.replicas == 0, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot keep {} copies of the state", options.replicas),
                   .needed = fmt::format("a number that {} ranks can be divided by", ranks)};
  });
  Placement placement = placement_of_stage(options.stage, ranks / options.replicas);
  placement.replicas *= options.replicas;
  placement.parameter_replicas = options.parameter_replicas;
  placement.reduction = options.reduction;
  placement.parameters = options.parameters;
  placement.gradients = options.gradients;
  placement.state = options.state;
  return placement;
}

// What the rules keep, which has to be the same for all: it is laid out once.
optim::StateNames names_of(const std::vector<optim::Rule>& groups) {
  require(!groups.empty(), Code::bad_argument, [] {
    return Problem{.what = "cannot plan a training: it has no parameter groups", .needed = "at least one rule"};
  });
  for (std::size_t group = 1; group < groups.size(); ++group) {
    require(groups[group].index() == groups[0].index(), Code::unsupported, [&] {
      return Problem{.what = "cannot plan a training: its parameter groups have different kinds of rules",
                     .where = fmt::format("parameter group {}", group),
                     .needed = fmt::format("the rule {}, as group 0 has it", name(groups[0])),
                     .available = fmt::format("the rule {}", name(groups[group]))};
    });
  }
  const optim::StateNames names = optim::state_names(groups[0]);
  require(std::ranges::all_of(groups, [&](const optim::Rule& rule) { return optim::state_names(rule) == names; }),
          Code::unsupported, [] {
            return Problem{.what = "cannot plan a training: its parameter groups have different numbers of own values",
                           .needed = "the same number for all"};
          });
  return names;
}

// The most of all groups: what it costs is planned for.
std::optional<std::size_t> orthogonalization_steps(const std::vector<optim::Rule>& groups) {
  std::optional<std::size_t> steps;
  for (const optim::Rule& rule : groups)
    steps = std::max(steps, optim::orthogonalization_steps(rule));  // none is less than 0
  return steps;
}

PlanOptions plan_options(const TrainingOptions& options, const RankOf& position,
                         const std::vector<optim::Rule>& groups) {
  require(!options.drives.mirror || !options.drives.run.empty(), Code::bad_argument, [] {
    return Problem{.what = "cannot mirror state on drives: it belongs to no run",
                   .needed = "a name of the run",
                   .remedy = "Name the run, or leave out mirror."};
  });
  require_clipping(options.schedule.update_in_backward, options.max_norm);
  std::ranges::for_each(groups, [](const optim::Rule& rule) { optim::check(rule); });
  if (!options.drives.run.empty()) require_run_on_drives(options.drives.run, options.state);
  const optim::StateNames names = names_of(groups);
  Schedule schedule = options.schedule;
  // The trainer makes its own updates when the step is decided, and joint runs write theirs in turn.
  if (std::holds_alternative<optim::External>(groups[0]) || options.drives.before_write) schedule.most_repeats = 0;
  return {.placement = placement_of(options, position.ranks),
          .rank = position.rank,
          .ranks_per_host = position.ranks_per_host,
          .shares_memory = position.shares_memory,
          .tile_elements = options.tile_elements,
          .micro_steps = options.micro_steps,
          .format = options.format,
          .gradient_format = options.gradient_format,
          .names = names,
          .rule = describe(groups[0]),
          .orthogonalization_steps = orthogonalization_steps(groups),
          .trace = options.trace,
          .schedule = schedule,
          .wire = options.wire,
          .rates = std::holds_alternative<optim::External>(groups[0]) ? TransferRates{} : options.rates,
          .mirror = options.drives.mirror,
          .full_records = !options.drives.run.empty(),
          .host_is_device = !options.gpu};
}

// The trainer's own updates need all masters in fp32 when the norm is known.
void require_custom_update(const CompiledPlan& plan, bool is_checked) {
  bool in_fp32 = true;
  for (std::size_t unit = 0; unit < plan.model().units.size(); ++unit)
    in_fp32 = in_fp32 && plan.blocks().state(unit, 0).format() == StateFormat::fp32;
  require(!is_checked, Code::unsupported, [] {
    return Problem{.what = "cannot verify updates: the trainer makes them itself", .needed = "a rule of the library"};
  });
  require(in_fp32 && !plan.input().schedule.update_in_backward, Code::unsupported, [] {
    return Problem{.what = "cannot call a custom update: its masters are not in fp32 when the norm is known",
                   .needed = "state of format fp32, and updates after the backward pass"};
  });
}

std::unique_ptr<const CompiledPlan> compiled_plan(Model model, const RankOf& position,
                                                  const std::vector<optim::Rule>& groups,
                                                  const TrainingOptions& options) {
  const PlanOptions all = plan_options(options, position, groups);
  require_groups(model, groups.size());
  auto compiled = std::make_unique<const CompiledPlan>(std::move(model), all);
  if (std::holds_alternative<optim::External>(groups[0])) require_custom_update(*compiled, options.verify > 0);
  return compiled;
}

}  // namespace

std::vector<optim::Rule> Groups::of(const Model& model) const {
  if (named_.empty()) return rules_;
  std::vector<optim::Rule> ordered;
  for (const std::string& group : model.groups) {
    const auto found = std::ranges::find(named_, group, &Named::group);
    require(found != named_.end(), Code::bad_argument, [&] {
      return Problem{.what = fmt::format("cannot train: the parameter group \"{}\" has no rule", group),
                     .needed = "a rule for each group of the model"};
    });
    ordered.push_back(found->rule);
  }
  for (const Named& named : named_) {
    require(std::ranges::count(named_, named.group, &Named::group) == 1 &&
                std::ranges::count(model.groups, named.group) == 1,
            Code::bad_argument, [&] {
              return Problem{
                  .what = fmt::format("cannot train: the rule for \"{}\" is not that of one group", named.group),
                  .needed = fmt::format("one rule for each of the groups {}", fmt::join(model.groups, ", ")),
                  .remedy = "Name groups by Model::group()."};
            });
  }
  return ordered;
}

Plan::Plan(Model model, const RankOf& position, const Groups& groups, const TrainingOptions& options) {
  const std::vector<optim::Rule> rules = groups.of(model);
  compiled_ = compiled_plan(std::move(model), position, rules, options);
}
const CompiledPlan& compiled(const Plan& plan) { return *plan.compiled_; }

Plan::Plan(Plan&&) noexcept = default;
Plan::~Plan() = default;

const Model& Plan::model() const { return compiled_->model(); }
const Placement& Plan::placement() const { return compiled_->placement(); }
Ledger Plan::ledger() const { return ledger_of(compiled_->program(), compiled_->blocks().records()); }
std::string Plan::to_text() const { return ballast::to_text(compiled_->program()); }

Simulation Plan::simulate(const Machine& machine, std::span<const UnitWork> work) const {
  require(work.size() == model().units.size(), Code::wrong_size, [&] {
    return Problem{.what = "cannot simulate a step: the work of some units is missing",
                   .needed = fmt::format("{} entries, one for each unit", model().units.size()),
                   .available = std::to_string(work.size())};
  });
  return ballast::simulate({compiled_->program(), placement(), machine, work});
}

}  // namespace ballast
