#include <ballast/error.h>
#include <ballast/training_state.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "zero/agreed_options.h"
#include "zero/checkpoint/checkpoint.h"
#include "zero/engine/custom_update.h"
#include "zero/engine/leased_unit.h"
#include "zero/engine/local_state.h"
#include "zero/engine/off_plan.h"
#include "zero/engine/op_executor.h"
#include "zero/engine/scheduler.h"
#include "zero/plan/compile.h"
#include "zero/plan/program_cost.h"
#include "zero/runs/records.h"

namespace ballast {
namespace {

static_assert(max_note_bytes == offload::max_note_bytes);

void set_lr_of(optim::Rule& rule, double lr) {
  std::visit(
      [lr](auto& of) {
        if constexpr (requires { of.lr; }) of.lr = lr;
      },
      rule);
}

DeviceMemory device_memory(const TrainingOptions& options, const Mesh& mesh) {
  return {.gpu = options.gpu,
          .allocator = options.allocator,
          .shared = (mesh.host ? mesh.host : mesh.gather)->shared_memory(),
          .threads = options.threads};
}

Mesh mesh_of(Communicator& world, const CompiledPlan& plan, const GpuLanes* gpu, const TrainingOptions& options) {
  const bool needs_host = std::ranges::any_of(plan.program().ops, passes_host);
  Mesh mesh =
      make_mesh(world, plan.placement(), gpu, {plan.input().needs_matrices(), needs_host, parts_of(plan.model())});
  mesh.norm = options.norm_group;
  check_across(options.wire, mesh);
  return mesh;
}

// Other programs of the training keep the slot in its memory.
std::unique_ptr<RecordMirror> make_mirror(Records* records, const Slots& slots) {
  if (records == nullptr || records->mirror() == nullptr) return nullptr;
  return std::make_unique<RecordMirror>(*records->mirror(), *records->stores().trained,
                                        slots.all_of(SlotRole::mirror).as_bytes());
}

// Null if the rule is of elements.
std::unique_ptr<kernels::Orthogonalizer> make_orthogonalizer(const CompiledPlan& plan, const GpuLanes* gpu,
                                                             int threads) {
  if (!plan.input().needs_matrices()) return nullptr;
  return gpu == nullptr ? kernels::cpu_orthogonalizer({.threads = threads})
                        : kernels::cuda_orthogonalizer(gpu->stream(Lane::update).handle(), gpu->gpu());
}

std::unique_ptr<CorruptionCheck> make_check(const CompiledPlan& plan, std::size_t every, std::size_t rank) {
  if (every == 0) return nullptr;
  require(!plan.input().needs_matrices(), Code::unsupported, [] {
    return Problem{.what = "cannot verify updates of whole matrices",
                   .needed = "a rule of elements, such as AdamW",
                   .remedy = "Leave verify out."};
  });
  return std::make_unique<CorruptionCheck>(plan, every, rank);
}

}  // namespace

std::shared_ptr<ExchangeOrder> make_exchange_order() { return std::make_shared<ExchangeOrder>(); }

// The parts of a training, for one rank's trainer. Operations run on the lanes' threads. An off-plan step, which leaves the
// program's order, is served on demand to its end: with the same bits, but without prefetching. An order that comes twice in a
// row becomes the program of the following steps.
struct Training::Impl {
  Impl(Model model, Communicator& all, const Groups& rules, const TrainingOptions& asked)
      : groups(rules.of(model)),
        options(agreed_options(asked, groups, model, all, warnings)),
        world(all),
        planned(std::move(model), {all.rank(), all.size(), all.ranks_per_host(), all.shares_memory()}, groups,
                options) {
    scheduler.follow_program(running.program().ops);
    if (gpu != nullptr || options.allocator != nullptr) state.clear_device_memory();
  }

  Impl(Impl&&) = delete;

  // Lanes end before the objects that they use. Open uses cannot end any more, so operations that wait for them fail.
  ~Impl() {
    lives.reset();
    scheduler.abandon_uses();
    try {
      const std::string reason = refusal.empty() ? "" : ", after this error: " + refusal;
      if (off_plan.has_gradients()) mesh.abort("its training was ended in the middle of a step" + reason);
    } catch (const std::exception&) {
    }
    threads.stop();
    if (drives) drives->finish();  // a late read would write to memory of a slot that is freed
    if (gpu == nullptr) return;
    try {  // no work may use the slots when they are freed
      gpu->finish();
      trainer.finish();
    } catch (const Error&) {
    }
  }

  void require_usable() const {
    failure.check();
    require(has_begun, Code::out_of_order, [] {
      return Problem{.what = "cannot use the training: it has no parameters yet",
                     .needed = "start(), initialize() or resume() first"};
    });
    require(!is_offloaded, Code::out_of_order, [] {
      return Problem{.what = "cannot use the training: it is offloaded from its device", .needed = "reload() first"};
    });
  }

  void require_between_steps(std::string_view what) const {
    require_usable();
    const bool is_in_step = scheduler.uses().oldest() != nullptr || off_plan.has_gradients() || agreement.is_prepared();
    require(!is_in_step, Code::out_of_order, [&] {
      return Problem{.what = fmt::format("cannot {}: it is in the middle of a step", what),
                     .needed = "step() after each backward pass, and the end of all leases"};
    });
  }

  void require_not_begun() const {
    require(!has_begun, Code::out_of_order, [] {
      return Problem{.what = "cannot begin the training: it has begun",
                     .needed = "start(), initialize() or resume() once, and TrainingState::change() after that"};
    });
  }

  void require_unit(std::size_t unit) const {
    const std::vector<Unit>& units = plan.model().units;
    require(unit < units.size(), Code::bad_argument, [&] {
      return Problem{.what = fmt::format("there is no unit {}", unit),
                     .needed = fmt::format("a unit below {}", units.size())};
    });
  }

  void require_acquirable(std::size_t unit, Phase phase) const {
    require_unit(unit);
    require_usable();
    const bool sums_once = plan.input().placement.reduction == Reduction::boundary;
    require(!norm_is_known || phase != Phase::backward || !sums_once, Code::out_of_order, [] {
      return Problem{.what = "cannot add gradients: groups of ranks have summed theirs for the norm",
                     .needed = "norms and clipping after the last backward pass of a step, or Reduction::each",
                     .remedy = "Make the step first, or discard its gradients."};
    });
  }

  Lease acquire(std::size_t unit, Phase phase, bool exact = false) {
    require_acquirable(unit, phase);
    const Trace chain = visits_of(plan.model(), unit, phase, exact);
    scheduler.issue_up_to_trainer();
    if (!scheduler.uses_next(chain)) {
      if (options.schedule.layer_major) warn_of_order(chain.back());
      off_plan.serve(chain);
    }
    const std::size_t first = scheduler.uses().next_number();
    std::vector<LeasedUnit> memory;
    while (memory.size() < chain.size()) {
      memory.push_back(memory_of(scheduler.begin_use()));
    }
    off_plan.remember(chain);
    const std::size_t end = first + memory.size();
    return Lease(std::move(memory), lives, [this, first, end] {
      for (std::size_t use = first; use < end; ++use)
        scheduler.end_use(use);
    });
  }

  // Micro-step by micro-step, each use would read the parameters anew.
  void warn_of_order(const Visit& use) {
    options.drives.log->write_once(
        Level::warning, "layer_major",
        fmt::format(
            "unit {} is used in {} in another order than that of Schedule::layer_major, which is the uses of a unit "
            "for all micro-steps in a row: such steps are slower",
            plan.model().units[use.unit].name, name(use.phase)));
  }

  LeasedUnit memory_of(const Op& use) const {
    const Unit& unit = plan.model().units[use.unit];
    return {.number = use.unit,
            .unit = &unit,
            .layout = &plan.layout().units[use.unit],
            .parameters = slots.view(use.from, unit.dtype),
            .backward = use.phase == Phase::backward,
            .gradients = use.to.exists() ? slots.view(use.to, unit.dtype) : View{}};
  }

  void finish() {
    require_usable();
    scheduler.finish();
  }

  void begin() {
    scheduler.run_entry(running.program().entry, true);
    has_begun = true;
    number_step();
  }

  void number_step() {
    StepRun& run = scheduler.run();
    run.step = agreement.steps() + 1;
    run.expected.reset();
    run.is_early = false;
  }

  void before_write(RunWrite write) const {
    if (options.drives.before_write && drives && drives->keeps_run()) options.drives.before_write(write);
  }

  // Returns the options with the training's own where they leave something out.
  StepOptions completed(StepOptions step) const {
    if (step.groups.empty()) step.groups = groups;
    if (!step.max_norm) step.max_norm = options.max_norm;
    return step;
  }

  // Throws before anything changes: a rank that stopped after the agreement would leave the others a step ahead.
  void prepare(const StepOptions& step) {
    require_usable();
    refuse_alone([&] { agreement.check(step); });
    before_write(RunWrite::step);
    agreement.prepare(step);
    if (options.schedule.update_in_backward) scheduler.run().numbers = agreement.numbers_before_norm();
  }

  StepResult step() {
    require_usable();
    refuse_alone([this] { agreement.check_accumulated(off_plan.visited()); });
    reach_agreement();
    StepRun& run = scheduler.run();
    const std::size_t decision = scheduler.position();
    if (agreement.has_custom_update())
      update_by_trainer(plan, slots, scheduler, failure, agreement.take_custom_update());
    run.note = note;
    run.round = round;
    if (!run.is_early) scheduler.issue_rest();
    if (run.is_early) scheduler.issue_next();  // updates after the agreement need its numbers
    scheduler.wait_for(decision);
    if (run.is_early) run.is_as_expected ? scheduler.issue_rest() : off_plan.repeat_updates();
    const bool could_be_early = off_plan.is_repeated() || !off_plan.is_off_plan();
    agreement.end_step(run.numbers.number);
    off_plan.end_step();
    scheduler.begin_step();
    number_step();
    norm_is_known = false;
    refusal.clear();
    if (plan.input().updates_early() && could_be_early) off_plan.update_early(repeats.add(!run.is_as_expected));
    run.result.metrics = counters.end_step(metrics());
    return run.result;
  }

  // Does a check that this rank alone may fail. The step has no options then. Others wait for this rank in the step: if its training
  // ends then, they learn why.
  template <class Check>
  void refuse_alone(const Check& refuses) {
    try {
      refuses();
    } catch (const Error& error) {
      agreement.cancel();
      refusal = error.what();
      throw;
    }
  }

  // A backward pass that makes updates needs their options when it begins.
  void prepare_backward() {
    if (options.schedule.update_in_backward && !agreement.is_prepared()) prepare(completed({}));
    if (plan.input().updates_early() && !scheduler.run().expected && !off_plan.is_off_plan()) expect_step();
  }

  // The order of updates may return to early ones, so the expectations of all steps are compared with what comes.
  void expect_step() {
    StepRun& run = scheduler.run();
    if (!agreement.is_prepared()) agreement.expect(has_expectation ? std::nullopt : std::optional(std::span(groups)));
    run.expected = agreement.expected();
    run.numbers = agreement.numbers_before_norm();
    run.is_early = running.input().updates_early();
  }

  // Completes the gradients of the backward passes so far.
  void complete_gradients(std::optional<std::size_t> micro_steps) {
    require_usable();
    require(!options.schedule.update_in_backward, Code::out_of_order, [] {
      return Problem{.what = "cannot compute the norm: update_in_backward updates parameters before it is known",
                     .needed = "updates after the backward pass"};
    });
    agreement.check_accumulated(off_plan.visited(), micro_steps);
    reach_agreement();
    norm_is_known = true;
    scheduler.wait_for_issued();
  }

  void reach_agreement() {
    const Op* const open = scheduler.uses().oldest();
    require(open == nullptr, Code::out_of_order, [&] {
      return Problem{.what = "cannot step: a lease has not ended",
                     .where = fmt::format("unit {}", plan.model().units[open->unit].name),
                     .needed = "the end of all leases"};
    });
    scheduler.issue_up_to_trainer();
    if (!scheduler.is_at_agreement()) off_plan.serve_step();
    trainer.finish();
  }

  Metrics metrics() const {
    Metrics metrics = counters.totals();
    metrics.verified = check ? check->places() : 0;
    const SentBytes sent = mesh.sent() + (mirror ? mirror->sent() : SentBytes{});
    metrics.sent_inside = sent.inside;
    metrics.sent_across = sent.across;
    metrics.memory = running.memory();
    return metrics;
  }

  std::size_t device_bytes() const { return running.memory()[static_cast<std::size_t>(Tier::device)]; }

  CheckpointPlace checkpoint_in(const std::filesystem::path& directory) {
    return {.plan = plan, .world = world, .known = checkpoints, .directory = directory, .log = options.drives.log};
  }

  // A change that belongs to no round of its own is one of the last round's state.
  JointRound round_of_change() const { return round.exists() || !drives ? round : drives->round(); }

  const Timeline& kept_timeline() const {
    require(timeline != nullptr, Code::bad_argument, [] {
      return Problem{.what = "cannot read the timeline: this training keeps none", .needed = "keeps_timeline"};
    });
    return *timeline;
  }

  Log warnings{Log::to_stderr, Level::warning};  // where the caller has no log
  std::vector<optim::Rule> groups;
  TrainingOptions options;
  Communicator& world;
  Plan planned;
  const CompiledPlan& plan = compiled(planned);
  // The CPU's, called by several lanes at once.
  std::unique_ptr<kernels::Backend> backend = kernels::cpu_backend({.threads = options.threads});
  MemoryAccounts accounts;
  // Null: none is kept.
  std::unique_ptr<Timeline> timeline = options.keeps_timeline ? std::make_unique<Timeline>() : nullptr;
  // Null: no tile is on a drive.
  std::unique_ptr<Records> records =
      plan.uses_drives() ? std::make_unique<Records>(plan, world, options.drives) : nullptr;
  // Its memory is the device tier; null: the host's.
  std::unique_ptr<GpuLanes> gpu = options.gpu ? std::make_unique<GpuLanes>(*options.gpu) : nullptr;
  std::unique_ptr<kernels::Orthogonalizer> orthogonalizer = make_orthogonalizer(plan, gpu.get(), options.threads);
  Mesh mesh = mesh_of(world, plan, gpu.get(), options);  // after all that loads kernels

  std::shared_ptr<const bool> lives = std::make_shared<const bool>(true);  // leases see when it expires
  RunningProgram running{plan};
  Slots slots{running.program(), accounts, device_memory(options, mesh),
              records ? records->queues() : std::vector<offload::IoQueue*>{}};
  // The trainer's; none: it works on the host.
  std::optional<Stream> stream = gpu ? std::optional(Stream::wrap(options.stream, gpu->gpu())) : std::nullopt;
  ExecContext trainer = stream ? ExecContext(*backend, *stream) : ExecContext(*backend);
  LaneArithmetic arithmetic{plan, slots, *backend, gpu.get()};
  // Null: records are not mirrored.
  std::unique_ptr<RecordMirror> mirror = make_mirror(records.get(), slots);
  std::unique_ptr<const RecordLane> drives =
      records ? std::make_unique<const RecordLane>(plan, slots, records->stores(), mirror.get()) : nullptr;
  // Null: no update is checked.
  std::unique_ptr<CorruptionCheck> check = make_check(plan, options.verify, mesh.rank());
  // Null: the rule is of elements.
  std::unique_ptr<const MatrixExecutor> matrices =
      orthogonalizer ? std::make_unique<const MatrixExecutor>(plan, mesh, slots, *orthogonalizer) : nullptr;
  ExchangeTurns exchanges{options.exchanges, mesh.ranks()};  // exchanges between GPUs
  FirstFailure failure{plan.model(), mesh, exchanges};
  StepCounters counters{plan.placement(), timeline.get(), trainer.stream()};
  TensorSums tensor_sums{plan, arithmetic, accounts, options.gpu};
  Agreement agreement{plan, mesh, arithmetic, tensor_sums, options.sums_micro_steps};
  // Null: exchanges are those of a GPU.
  std::unique_ptr<SendAhead> ahead = gpu == nullptr ? std::make_unique<SendAhead>(plan, slots, mesh) : nullptr;
  OpExecutor executor{{.plan = plan,
                       .mesh = mesh,
                       .slots = slots,
                       .arithmetic = arithmetic,
                       .agreement = agreement,
                       .counters = counters,
                       .failure = failure,
                       .exchanges = exchanges,
                       .records = drives.get(),
                       .check = check.get(),
                       .matrices = matrices.get(),
                       .ahead = ahead.get()}};
  LaneThreads threads{gpu.get()};
  Scheduler scheduler{{.threads = threads,
                       .trainer = trainer,
                       .exchanges = exchanges,
                       .counters = counters,
                       .failure = failure,
                       .gpu = gpu.get(),
                       .execute = [this](const IssuedOp& issued) { executor.run(issued); },
                       .ahead = ahead.get()}};
  RepeatShare repeats{options.schedule.most_repeats};
  OffPlan off_plan{{.running = running, .slots = slots, .scheduler = scheduler, .counters = counters}};
  HomeMemory homes{running, slots, arithmetic};
  LocalState state{{.running = running,
                    .slots = slots,
                    .arithmetic = arithmetic,
                    .homes = homes,
                    .mesh = mesh,
                    .records = drives.get()}};
  std::vector<std::byte> note;
  JointRound round{};
  bool has_begun = false;
  KnownCheckpoints checkpoints{};
  bool is_offloaded = false;
  bool has_expectation = false;  // the caller has said what the steps expect, or gives them rules of their own
  bool norm_is_known = false;    // whether this step's norm is known
  std::string refusal{};         // the text of the last error by which this rank alone could not step
};

Training::Training(Model model, Communicator& world, const Groups& groups, const TrainingOptions& options)
    : impl_(std::make_unique<Impl>(std::move(model), world, groups, options)) {}
Training::~Training() = default;

bool Training::found() const { return impl_->records && impl_->records->found(); }
void Training::start(const ParameterSource& source) { found() ? resume(source) : initialize(source); }

void Training::initialize(const ParameterSource& source) {
  require(!found(), Code::out_of_order, [&] {
    return Problem{
        .what = "cannot initialize the training: its run has steps, which would be lost",
        .where = fmt::format("run \"{}\"", impl_->options.drives.run),
        .needed = "start() or resume(), which continue the run",
        .remedy = "Begin the run again with RecordOptions::resume_at {0, 0}, or give this one another name."};
  });
  impl_->require_not_begun();
  impl_->state.initialize(source);
  impl_->begin();
}

void Training::resume(const ParameterSource& frozen) {
  const std::string& run = impl_->options.drives.run;
  require(found() || run.empty(), Code::out_of_order, [&] {
    return Problem{.what = "cannot resume the training: its run has no steps",
                   .where = fmt::format("run \"{}\"", run),
                   .needed = "start() or initialize(), which begin the run"};
  });
  impl_->require_not_begun();
  impl_->agreement.set_steps(impl_->state.resume(frozen));
  if (impl_->drives) impl_->note.assign(impl_->drives->note().begin(), impl_->drives->note().end());
  impl_->begin();
}

Lease Training::forward(std::size_t unit) { return impl_->acquire(unit, Phase::forward); }

Lease Training::backward(std::size_t unit) {
  impl_->prepare_backward();
  return impl_->acquire(unit, Phase::backward);
}

double Training::gradient_norm(double loss_scale, std::optional<std::size_t> micro_steps) {
  impl_->complete_gradients(micro_steps);
  return impl_->agreement.norm(impl_->scheduler.rest().front(), loss_scale, micro_steps);
}

void Training::leave_out(std::size_t unit, std::size_t tensor) {
  impl_->require_usable();
  impl_->require_unit(unit);
  const std::vector<Tensor>& tensors = impl_->plan.model().units[unit].tensors;
  require(tensor < tensors.size() && !tensors[tensor].frozen, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot leave out tensor {}: it is not trained", tensor),
                   .where = fmt::format("unit {}", impl_->plan.model().units[unit].name),
                   .needed = "a trained tensor of the unit"};
  });
  impl_->options.schedule.update_in_backward ? impl_->scheduler.run().numbers.leave_out(unit, tensor)
                                             : impl_->agreement.leave_out(unit, tensor);
}

StepResult Training::step(double loss_scale) {
  const bool in_backward = impl_->options.schedule.update_in_backward;
  if (!in_backward && !impl_->agreement.is_prepared()) return step({.loss_scale = loss_scale});
  require(loss_scale == 1.0, Code::out_of_order, [&] {
    return Problem{
        .what = fmt::format("cannot step with a loss scale of {}: the step has its options already", loss_scale),
        .needed = "a loss that is not scaled, or its scale in prepare(options)"};
  });
  impl_->prepare_backward();  // if no unit was used in backward
  return impl_->step();
}

StepResult Training::step(const StepOptions& options) {
  require(!impl_->options.schedule.update_in_backward, Code::out_of_order, [] {
    return Problem{.what = "cannot step with options: the updates are made already",
                   .needed = "prepare(options) before backward, and step() without any"};
  });
  prepare(options);
  return impl_->step();
}

void Training::prepare(const StepOptions& options) {
  impl_->has_expectation = !options.groups.empty();
  impl_->prepare(impl_->completed(options));
}

void Training::expect(std::span<const optim::Rule> groups, std::span<const std::uint64_t> missed) {
  impl_->require_usable();
  impl_->has_expectation = true;
  if (!impl_->agreement.is_prepared()) impl_->agreement.expect(groups, missed);
}

void Training::finish() { impl_->finish(); }

std::vector<optim::Rule>& Training::groups() { return impl_->groups; }

void Training::set_lr(double lr) {
  std::ranges::for_each(impl_->groups, [lr](optim::Rule& rule) { set_lr_of(rule, lr); });
}

void Training::set_lr(std::string_view group, double lr) {
  const std::vector<std::string>& names = model().groups;
  const auto found = std::ranges::find(names, group);
  require(found != names.end(), Code::bad_argument, [&] {
    return Problem{
        .what = fmt::format("cannot set the learning rate of \"{}\": there is no such parameter group", group),
        .needed = fmt::format("one of {}", fmt::join(names, ", "))};
  });
  set_lr_of(impl_->groups[static_cast<std::size_t>(found - names.begin())], lr);
}

std::uint64_t Training::steps() const { return impl_->agreement.steps(); }

void Training::save(const std::filesystem::path& directory) {
  impl_->require_between_steps("save a checkpoint");
  TrainingState state(*this);
  save_checkpoint(impl_->checkpoint_in(directory), steps(), note(), state.tiles(),
                  [&](const TileVisitor& visit, const TileFilter& which) { state.visit(visit, which); });
}

bool Training::load(const std::filesystem::path& directory) {
  impl_->require_between_steps("load a checkpoint");
  TrainingState state(*this);
  const auto change = [&](const TileVisitor& visit, const std::function<LoadedCheckpoint()>& agree) {
    state.change(visit, [&] {
      const LoadedCheckpoint loaded = agree();
      state.set_steps(loaded.step);
      set_note(loaded.note);
    });
  };
  return load_checkpoint(impl_->checkpoint_in(directory), state.tiles(), change);
}

void Training::set_note(std::span<const std::byte> note) {
  require(note.size() <= max_note_bytes, Code::wrong_size, [&] {
    return Problem{.what = "cannot set the note: it does not fit into a commit",
                   .needed = fmt::format("{} bytes", note.size()),
                   .available = fmt::format("{} bytes", max_note_bytes)};
  });
  impl_->note.assign(note.begin(), note.end());
}

const std::vector<std::byte>& Training::note() const { return impl_->note; }

const Model& Training::model() const { return impl_->plan.model(); }
const Plan& Training::plan() const { return impl_->planned; }
Communicator& Training::world() const { return impl_->world; }
const MemoryAccounts& Training::memory() const { return impl_->accounts; }
Ledger Training::ledger() const { return ledger_of(impl_->running.program(), impl_->plan.blocks().records()); }

Metrics Training::metrics() const { return impl_->metrics(); }

std::vector<UnitWork> Training::unit_work() const { return impl_->kept_timeline().work(model().units.size()); }
std::string Training::chrome_trace() const {
  return impl_->kept_timeline().to_chrome_trace(model(), impl_->mesh.rank());
}

const std::optional<LostRun>& TrainingState::lost() const {
  static const std::optional<LostRun> nothing;
  return impl_->records ? impl_->records->lost() : nothing;
}

Lease TrainingState::exact_parameters(std::size_t unit) {
  return impl_->acquire(unit, Phase::forward, impl_->plan.input().gathers_codes());
}

std::vector<std::vector<double>> TrainingState::tensor_norms(double loss_scale,
                                                             std::optional<std::size_t> micro_steps) {
  impl_->complete_gradients(micro_steps);
  return impl_->agreement.tensor_norms(impl_->scheduler.list(), loss_scale, micro_steps);
}

void TrainingState::visit_gradients(const GradientVisitor& visit, std::optional<std::size_t> micro_steps) {
  impl_->complete_gradients(micro_steps);
  impl_->scheduler.run().expected.reset();  // updates that were made before are not those with the changed gradients
  impl_->tensor_sums.visit(impl_->scheduler.list(), impl_->scheduler.rest().front(), impl_->slots, visit);
}

void TrainingState::wait_for_parameters(std::size_t unit) {
  impl_->require_usable();
  impl_->require_unit(unit);
  impl_->scheduler.wait_for_parameters(unit);
}

std::string TrainingState::program() const { return to_text(impl_->running.program()); }

void TrainingState::wait_for_commit() {
  impl_->require_usable();
  impl_->scheduler.wait_for_last_step();
}

void TrainingState::require_between_steps(std::string_view what) const { impl_->require_between_steps(what); }

void TrainingState::offload(bool parameters, const AgreeOnMemory& agree) {
  impl_->require_between_steps("offload the training");
  impl_->scheduler.finish();
  Staging staging = impl_->homes.staging(impl_->device_bytes());
  impl_->slots.offload(impl_->running.program(), staging, parameters, agree);
  impl_->is_offloaded = true;
  impl_->off_plan.restart_step();  // uses in forward since the last step are discarded
}

void TrainingState::reload(const AgreeOnMemory& agree) {
  require(impl_->is_offloaded, Code::out_of_order, [] {
    return Problem{.what = "cannot reload: the training is already on its device", .needed = "offload() first"};
  });
  {
    Staging staging = impl_->homes.staging(impl_->device_bytes());
    impl_->slots.reload(staging, agree);
  }
  impl_->is_offloaded = false;
  impl_->scheduler.run_entry(impl_->running.program().entry, true);
}

void TrainingState::keep_gathered(std::size_t bytes, const AgreeOnMemory& agree) {
  impl_->require_between_steps("change the memory of the training");
  impl_->off_plan.keep_gathered(bytes, agree);
}

std::size_t TrainingState::gathered_bytes() const { return impl_->slots.all_of(SlotRole::gathered).bytes(); }

void TrainingState::visit(const TileVisitor& look, const TileFilter& which) {
  impl_->finish();
  impl_->off_plan.undo_updates();
  impl_->state.look(look, which);
}

// The entry gathers parameters and reads kept records again, from the changed state.
void TrainingState::change(const TileVisitor& change, const std::function<void()>& agree) {
  parameters_changed();
  impl_->before_write(RunWrite::change);
  impl_->state.change(change, agree, [this] {
    return CommittedState{impl_->agreement.steps(), impl_->note, impl_->round_of_change()};
  });
  impl_->off_plan.forget_gathered();
  impl_->scheduler.run_entry(impl_->running.program().entry, true);
}

std::vector<LocalTile> TrainingState::tiles() const { return impl_->state.tiles(); }

void TrainingState::set_steps(std::uint64_t steps) {
  impl_->agreement.set_steps(steps);
  impl_->number_step();
}

RunPoint TrainingState::committed() const {
  impl_->require_usable();
  impl_->scheduler.wait_for_last_step();
  const offload::RecordStore* const trained = impl_->records ? impl_->records->stores().trained : nullptr;
  const offload::CommitPoint point = trained != nullptr ? trained->point() : offload::CommitPoint{};
  return {point.incarnation, point.number};
}

void TrainingState::set_round(const JointRound& round) { impl_->round = round; }

View TrainingState::full_parameters(std::size_t unit) { return impl_->homes.full_parameters(unit); }

void TrainingState::parameters_changed() {
  impl_->finish();
  impl_->off_plan.undo_updates();
  if (impl_->check) impl_->check->forget();
}

void TrainingState::read_memory(const ConstView& view, std::byte* into) const {
  impl_->trainer.finish();
  impl_->homes.read(view, into);
}

std::size_t TrainingState::unreserved_bytes() const { return impl_->slots.unreserved_bytes(); }

std::string TrainingState::unpinned_because() const { return impl_->slots.unpinned_because(); }

}  // namespace ballast
