#include "zero/training.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/runtime/error.h"

namespace ballast {
namespace {

Placement placement_of(const TrainingOptions& options, std::size_t ranks) {
  require(options.replicas > 0 && ranks % options.replicas == 0, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot keep {} copies of the state", options.replicas),
                   .needed = fmt::format("a number that {} ranks can be divided by", ranks)};
  });
  Placement placement = placement_of_stage(options.stage, ranks / options.replicas);
  placement.replicas *= options.replicas;
  placement.reduction = options.reduction;
  placement.parameters = options.parameters;
  placement.gradients = options.gradients;
  placement.state = options.state;
  return placement;
}

// What the rules keep, which has to be the same for all: it is laid out once.
optim::StateNames names_of(const std::vector<optim::Rule>& groups) {
  require(!groups.empty(), Code::bad_argument,
          [] { return Problem{.what = "a training without parameter groups", .needed = "at least one rule"}; });
  require(std::ranges::all_of(groups, [&](const optim::Rule& rule) { return rule.index() == groups[0].index(); }),
          Code::unsupported, [] {
            return Problem{.what = "parameter groups with different kinds of rules", .needed = "one kind for all"};
          });
  return optim::state_names(groups[0]);
}

}  // namespace

PlanOptions plan_options(const TrainingOptions& options, const Communicator& world,
                         const std::vector<optim::Rule>& groups) {
  return {.placement = placement_of(options, world.size()),
          .rank = world.rank(),
          .tile_elements = options.tile_elements,
          .micro_steps = options.micro_steps,
          .format = options.format,
          .names = names_of(groups),
          .rule = std::string(optim::name(groups[0])),
          .trace = options.trace,
          .schedule = options.schedule,
          .full_records = !options.drives.run.empty(),
          .host_is_device = !options.gpu};
}

Training::Training(Model model, Communicator& world, std::vector<optim::Rule> groups, const TrainingOptions& options)
    : options_(options),
      groups_(std::move(groups)),
      plan_(std::move(model), plan_options(options, world, groups_)),
      backend_(kernels::cpu_backend({.threads = options.threads})),
      rank_(world.rank()) {
  if (options.keeps_timeline) timeline_.emplace();
  if (plan_.tiles_on_drive() > 0) records_.emplace(plan_, world, options.drives);
  if (options.gpu) gpu_.emplace(*options.gpu);
  mesh_ = make_mesh(world, plan_.placement(), gpu_ ? &*gpu_ : nullptr);
  mesh_.norm = options.norm_group;
  engine_.emplace(EngineParts{.plan = plan_,
                              .mesh = mesh_,
                              .backend = *backend_,
                              .accounts = accounts_,
                              .records = records_ ? &records_->store() : nullptr,
                              .timeline = timeline_ ? &*timeline_ : nullptr,
                              .queues = records_ ? records_->queues() : std::vector<offload::IoQueue*>{},
                              .gpu = gpu_ ? &*gpu_ : nullptr,
                              .stream = options.stream,
                              .allocator = options.allocator,
                              .verify = options.verify});
}

const Timeline& Training::timeline() const {
  require(timeline_.has_value(), Code::bad_argument, [] {
    return Problem{.what = "cannot read the timeline: this training keeps none", .needed = "keeps_timeline"};
  });
  return *timeline_;
}

// Where updates are made in the backward pass, it begins with their options.
void Training::prepare() {
  if (options_.schedule.update_in_backward && !engine_->prepared()) engine_->prepare(step_options(1.0));
}

Lease Training::backward(std::size_t unit) {
  prepare();
  return engine_->backward(unit);
}

StepResult Training::step(double loss_scale) {
  if (!options_.schedule.update_in_backward) return engine_->step(step_options(loss_scale));
  prepare();  // if no unit was used in backward
  return engine_->step();
}

}  // namespace ballast
