#include <ballast/error.h>
#include <ballast/training.h>
#include <fmt/format.h>

#include "zero/engine/engine.h"
#include "zero/engine/step_counters.h"
#include "zero/plan/compiled_plan.h"
#include "zero/plan/ledger.h"
#include "zero/runs/records.h"

namespace ballast {

namespace {

static_assert(max_note_bytes == offload::max_note_bytes);

// A run keeps the tiles that it began with, unless the caller asks for others, which it refuses.
TrainingOptions with_tiles_of_run(TrainingOptions options, Communicator& world) {
  const RecordOptions& drives = options.drives;
  if (options.tile_elements == 0 && !drives.run.empty() && !drives.directories.empty()) {
    options.tile_elements = tile_of_run(world, drives);
  }
  return options;
}

}  // namespace

std::shared_ptr<ExchangeOrder> make_exchange_order() { return std::make_shared<ExchangeOrder>(); }

struct Training::Impl {
  Impl(Model model, Communicator& world, std::vector<optim::Rule> rules, const TrainingOptions& asked);

  // The training's own where the options leave something out.
  StepOptions completed(StepOptions of_step) const {
    if (of_step.groups.empty()) of_step.groups = groups;
    if (!of_step.max_norm) of_step.max_norm = options.max_norm;
    return of_step;
  }
  // Where updates are made in the backward pass, it begins with their options.
  void prepare_backward() {
    if (options.schedule.update_in_backward && !engine->prepared()) engine->prepare(completed({}));
  }

  const Timeline& kept_timeline() const {
    require(timeline.has_value(), Code::bad_argument, [] {
      return Problem{.what = "cannot read the timeline: this training keeps none", .needed = "keeps_timeline"};
    });
    return *timeline;
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
    : options(with_tiles_of_run(asked, world)),
      groups(std::move(rules)),
      plan(std::move(model), {world.rank(), world.size(), world.ranks_per_host()}, groups, options),
      backend(kernels::cpu_backend({.threads = asked.threads})),
      rank(world.rank()) {
  const CompiledPlan& compiled = plan.compiled();
  if (asked.keeps_timeline) timeline.emplace();
  if (compiled.uses_drives()) records.emplace(compiled, world, asked.drives);
  if (asked.gpu) gpu.emplace(*asked.gpu);
  mesh = make_mesh(world, compiled.placement(), gpu ? &*gpu : nullptr, compiled.input().needs_matrices());
  mesh.norm = asked.norm_group;
  check_across(asked.wire, mesh);
  engine.emplace(EngineParts{.plan = compiled,
                             .mesh = mesh,
                             .backend = *backend,
                             .accounts = accounts,
                             .records = records ? records->stores() : RecordStores{},
                             .mirror = records ? records->mirror() : nullptr,
                             .timeline = timeline ? &*timeline : nullptr,
                             .queues = records ? records->queues() : std::vector<offload::IoQueue*>{},
                             .gpu = gpu ? &*gpu : nullptr,
                             .stream = asked.stream,
                             .allocator = asked.allocator,
                             .threads = asked.threads,
                             .before_write = asked.drives.before_write,
                             .sums_micro_steps = asked.sums_micro_steps,
                             .verify = asked.verify,
                             .exchanges = asked.exchanges});
}

Training::Training(Model model, Communicator& world, std::vector<optim::Rule> groups, const TrainingOptions& options)
    : impl_(std::make_unique<Impl>(std::move(model), world, std::move(groups), options)) {}
Training::~Training() = default;

bool Training::found() const { return impl_->records && impl_->records->found(); }
const std::optional<LostRun>& Training::lost() const {
  static const std::optional<LostRun> nothing;
  return impl_->records ? impl_->records->lost() : nothing;
}
void Training::start(const ParameterSource& source) { found() ? resume(source) : initialize(source); }

void Training::initialize(const ParameterSource& source) {
  require(!found(), Code::out_of_order, [&] {
    return Problem{
        .what = "cannot initialize the training: its run has steps, which would be lost",
        .where = fmt::format("run \"{}\"", impl_->options.drives.run),
        .needed = "start() or resume(), which continue the run",
        .remedy = "Begin the run again with RecordOptions::resume_at {0, 0}, or give this one another name."};
  });
  impl_->engine->initialize(source);
}

void Training::resume(const ParameterSource& frozen) {
  const std::string& run = impl_->options.drives.run;
  require(found() || run.empty(), Code::out_of_order, [&] {
    return Problem{.what = "cannot resume the training: its run has no steps",
                   .where = fmt::format("run \"{}\"", run),
                   .needed = "start() or initialize(), which begin the run"};
  });
  impl_->engine->resume(frozen);
}

Lease Training::forward(std::size_t unit) { return impl_->engine->forward(unit); }
Lease Training::exact_parameters(std::size_t unit) { return impl_->engine->exact_parameters(unit); }

Lease Training::backward(std::size_t unit) {
  impl_->prepare_backward();
  return impl_->engine->backward(unit);
}

double Training::gradient_norm(double loss_scale, std::optional<std::size_t> micro_steps) {
  return impl_->engine->gradient_norm(loss_scale, micro_steps);
}
std::vector<std::vector<double>> Training::tensor_norms(double loss_scale, std::optional<std::size_t> micro_steps) {
  return impl_->engine->tensor_norms(loss_scale, micro_steps);
}
void Training::visit_gradients(const GradientVisitor& visit, std::optional<std::size_t> micro_steps) {
  impl_->engine->visit_gradients(visit, micro_steps);
}

void Training::leave_out(std::size_t unit, std::size_t tensor) { impl_->engine->leave_out(unit, tensor); }

StepResult Training::step(double loss_scale) {
  if (!impl_->options.schedule.update_in_backward) return step({.loss_scale = loss_scale});
  require(loss_scale == 1.0, Code::out_of_order, [&] {
    return Problem{.what = fmt::format("cannot step with a loss scale of {}: the updates are made already", loss_scale),
                   .needed = "a loss that is not scaled, or prepare(options) before backward"};
  });
  impl_->prepare_backward();  // if no unit was used in backward
  return step_prepared();
}

StepResult Training::step(const StepOptions& options) { return impl_->engine->step(impl_->completed(options)); }
void Training::prepare(const StepOptions& options) { impl_->engine->prepare(impl_->completed(options)); }
StepResult Training::step_prepared() { return impl_->engine->step(); }
void Training::wait_for_parameters(std::size_t unit) { impl_->engine->wait_for_parameters(unit); }
void Training::wait_for_commit() { impl_->engine->wait_for_commit(); }
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
RunPoint Training::committed() const {
  impl_->engine->wait_for_commit();
  const offload::RecordStore* const trained = impl_->records ? impl_->records->stores().trained : nullptr;
  const offload::CommitPoint point = trained != nullptr ? trained->point() : offload::CommitPoint{};
  return {point.incarnation, point.number};
}
void Training::set_round(const JointRound& round) { impl_->engine->set_round(round); }
void Training::set_note(std::span<const std::byte> note) { impl_->engine->set_note(note); }
const std::vector<std::byte>& Training::note() const { return impl_->engine->note(); }
View Training::full_parameters(std::size_t unit) { return impl_->engine->full_parameters(unit); }
void Training::parameters_changed() { impl_->engine->parameters_changed(); }
void Training::read_memory(const ConstView& view, std::byte* into) const { impl_->engine->read_memory(view, into); }

const Model& Training::model() const { return impl_->plan.model(); }
const Plan& Training::plan() const { return impl_->plan; }
const MemoryAccounts& Training::memory() const { return impl_->accounts; }
Ledger Training::ledger() const {
  return ledger_of(impl_->engine->program(), impl_->plan.compiled().blocks().records());
}
Metrics Training::metrics() const { return impl_->engine->metrics(); }
std::string Training::unpinned_because() const { return impl_->engine->unpinned_because(); }

std::vector<UnitWork> Training::unit_work() const { return impl_->kept_timeline().work(model().units.size()); }
std::string Training::chrome_trace() const { return impl_->kept_timeline().to_chrome_trace(model(), impl_->rank); }

}  // namespace ballast
