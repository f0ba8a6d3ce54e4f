#include "zero/training.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/runtime/error.h"
#include "zero/engine/engine.h"

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

// Returns the names of the state that the rules keep. All rules must keep the same, because it is laid out once.
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

struct Training::Impl {
  Impl(Model model, Communicator& world, std::vector<optim::Rule> rules, const TrainingOptions& asked);

  StepOptions step_options(double loss_scale) const { return {groups, options.max_norm, loss_scale}; }
  // If updates are made in the backward pass, the engine needs their options before it.
  void prepare_backward() {
    if (options.schedule.update_in_backward && !engine->prepared()) engine->prepare(step_options(1.0));
  }

  TrainingOptions options;
  std::vector<optim::Rule> groups;
  Plan plan;
  std::unique_ptr<kernels::Backend> backend;
  MemoryAccounts accounts;
  std::optional<Records> records;
  std::optional<GpuLanes> gpu;
  Mesh mesh;
  std::size_t rank;
  std::optional<Timeline> timeline;
  std::optional<Engine> engine;
};

Training::Impl::Impl(Model model, Communicator& world, std::vector<optim::Rule> rules, const TrainingOptions& asked)
    : options(asked),
      groups(std::move(rules)),
      plan(std::move(model), plan_options(asked, world, groups)),
      backend(kernels::cpu_backend({.threads = asked.threads})),
      rank(world.rank()) {
  if (asked.keeps_timeline) timeline.emplace();
  if (plan.tiles_on_drive() > 0) records.emplace(plan, world, asked.drives);
  if (asked.gpu) gpu.emplace(*asked.gpu);
  mesh = make_mesh(world, plan.placement(), gpu ? &*gpu : nullptr);
  mesh.norm = asked.norm_group;
  engine.emplace(EngineParts{.plan = plan,
                             .mesh = mesh,
                             .backend = *backend,
                             .accounts = accounts,
                             .records = records ? &records->store() : nullptr,
                             .timeline = timeline ? &*timeline : nullptr,
                             .queues = records ? records->queues() : std::vector<offload::IoQueue*>{},
                             .gpu = gpu ? &*gpu : nullptr,
                             .stream = asked.stream,
                             .allocator = asked.allocator,
                             .verify = asked.verify});
}

Training::Training(Model model, Communicator& world, std::vector<optim::Rule> groups, const TrainingOptions& options)
    : impl_(std::make_unique<Impl>(std::move(model), world, std::move(groups), options)) {}
Training::~Training() = default;

bool Training::found() const { return impl_->records && impl_->records->found(); }
void Training::initialise(const ParameterSource& source) { impl_->engine->initialise(source); }
void Training::resume(const ParameterSource& frozen) { impl_->engine->resume(frozen); }
void Training::start(const ParameterSource& source) { found() ? resume(source) : initialise(source); }

Lease Training::forward(std::size_t unit) { return impl_->engine->forward(unit); }

Lease Training::backward(std::size_t unit) {
  impl_->prepare_backward();
  return impl_->engine->backward(unit);
}

double Training::gradient_norm(double loss_scale) { return impl_->engine->gradient_norm(loss_scale); }
std::vector<std::vector<double>> Training::tensor_norms(double loss_scale) {
  return impl_->engine->tensor_norms(loss_scale);
}

StepResult Training::step(double loss_scale) {
  if (!impl_->options.schedule.update_in_backward) return step(impl_->step_options(loss_scale));
  impl_->prepare_backward();  // if no unit was used in backward
  return step_prepared();
}

StepResult Training::step(const StepOptions& options) { return impl_->engine->step(options); }
void Training::prepare(const StepOptions& options) { impl_->engine->prepare(options); }
StepResult Training::step_prepared() { return impl_->engine->step(); }
void Training::finish() { impl_->engine->finish(); }

std::vector<optim::Rule>& Training::groups() { return impl_->groups; }
std::uint64_t Training::steps() const { return impl_->engine->steps(); }

void Training::offload(bool parameters, const AgreeOnMemory& agree) { impl_->engine->offload(parameters, agree); }
void Training::reload(const AgreeOnMemory& agree) { impl_->engine->reload(agree); }

void Training::visit_state(const TileVisitor& visit, const TileFilter& which) {
  impl_->engine->visit_state(visit, which);
}
void Training::change_state(const TileVisitor& change, const std::function<void()>& agree) {
  impl_->engine->change_state(change, agree);
}
std::vector<LocalTile> Training::local_tiles() const { return impl_->engine->local_tiles(); }
void Training::set_steps(std::uint64_t steps) { impl_->engine->set_steps(steps); }
View Training::full_parameters(std::size_t unit) { return impl_->engine->full_parameters(unit); }
void Training::parameters_changed() { impl_->engine->parameters_changed(); }
void Training::read_memory(const ConstView& view, std::byte* into) const { impl_->engine->read_memory(view, into); }

const Model& Training::model() const { return impl_->plan.model(); }
const Plan& Training::plan() const { return impl_->plan; }
const Program& Training::program() const { return impl_->engine->program(); }
const MemoryAccounts& Training::memory() const { return impl_->accounts; }
Ledger Training::ledger() const { return ledger_of(program(), impl_->plan.blocks().records()); }
Metrics Training::metrics() const { return impl_->engine->metrics(); }
std::string Training::unpinned_because() const { return impl_->engine->unpinned_because(); }

const Timeline& Training::timeline() const {
  require(impl_->timeline.has_value(), Code::bad_argument, [] {
    return Problem{.what = "cannot read the timeline: this training keeps none", .needed = "keeps_timeline"};
  });
  return *impl_->timeline;
}

std::string Training::chrome_trace() const { return timeline().to_chrome_trace(model(), impl_->rank); }

}  // namespace ballast
