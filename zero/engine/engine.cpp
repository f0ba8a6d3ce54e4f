#include "zero/engine/engine.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>

#include "zero/engine/staging.h"

namespace ballast {

std::size_t DeviceOffload::device_bytes() const {
  std::size_t bytes = 0;
  for (const Slot& slot : parts_.running.program().slots) {
    bytes += slot.tier == Tier::device ? slot.bytes : 0;
  }
  return bytes;
}

void DeviceOffload::offload(bool parameters, const AgreeOnMemory& agree) {
  const Program& program = parts_.running.program();
  parts_.scheduler.finish();
  Staging staging(parts_.arithmetic, device_bytes());
  parts_.slots.offload(program, staging, parameters, agree);
  is_offloaded_ = true;
  parts_.off_plan.restart_step();
}

void DeviceOffload::reload(const AgreeOnMemory& agree) {
  require(is_offloaded_, Code::out_of_order, [] {
    return Problem{.what = "cannot reload: the training is already on its device", .needed = "offload() first"};
  });
  {
    Staging staging(parts_.arithmetic, device_bytes());
    parts_.slots.reload(staging, agree);
  }
  is_offloaded_ = false;
  parts_.scheduler.run_entry(parts_.running.program().entry, true);
}

namespace {

DeviceMemory device_memory(const EngineParts& parts) {
  return {.gpu = parts.gpu == nullptr ? std::nullopt : std::optional(parts.gpu->gpu()),
          .allocator = parts.allocator,
          .shared = parts.mesh.gather->shared_memory(),
          .threads = parts.threads};
}

const EngineParts& checked(const EngineParts& parts) {
  const bool has_stores = (parts.records.trained != nullptr || parts.plan.tiles_on_drive() == 0) &&
                          (parts.records.frozen != nullptr || parts.plan.frozen_on_drive() == 0);
  require(has_stores, Code::bad_argument, [] {
    return Problem{.what = "cannot run a program that keeps tiles on a drive: there are no records",
                   .needed = "EngineParts::records"};
  });
  require(parts.verify == 0 || !parts.plan.input().needs_matrices(), Code::unsupported, [] {
    return Problem{.what = "cannot verify updates of whole matrices",
                   .needed = "a rule of elements, such as AdamW",
                   .remedy = "Leave verify out."};
  });
  return parts;
}

// Other programs of the training keep the slot in its memory.
std::unique_ptr<RecordMirror> record_mirror(const EngineParts& parts, const Slots& slots) {
  if (parts.mirror == nullptr) return nullptr;
  const std::vector<Slot>& all = parts.plan.program().slots;
  const auto slot = std::ranges::find(all, SlotRole::mirror, &Slot::role);
  require(slot != all.end(), Code::internal, [] { return Problem{.what = "a mirrored program has no memory for it"}; });
  const Piece memory{static_cast<std::size_t>(slot - all.begin()), 0, slot->bytes};
  return std::make_unique<RecordMirror>(*parts.mirror, *parts.records.trained, slots.bytes(memory));
}

std::unique_ptr<const RecordLane> record_lane(const EngineParts& parts, const Slots& slots, RecordMirror* mirror) {
  if (!parts.plan.uses_drives()) return nullptr;
  return std::make_unique<const RecordLane>(parts.plan, slots, parts.records, mirror);
}

std::unique_ptr<CorruptionCheck> corruption_check(const EngineParts& parts) {
  if (parts.verify == 0) return nullptr;
  return std::make_unique<CorruptionCheck>(parts.plan, parts.verify, parts.mesh.rank());
}

std::unique_ptr<const MatrixExecutor> matrix_executor(const EngineParts& parts, const Slots& slots) {
  if (!parts.plan.input().needs_matrices()) return nullptr;
  return std::make_unique<const MatrixExecutor>(parts.plan, parts.mesh, slots, parts.gpu, parts.threads);
}

}  // namespace

Engine::Engine(const EngineParts& parts)
    : parts_(checked(parts)),
      running_(parts.plan),
      slots_(running_.program(), parts.accounts, device_memory(parts), parts.queues),
      trainer_(parts.backend, parts.gpu, parts.stream),
      arithmetic_(parts.plan, slots_, parts.backend, parts.gpu),
      mirror_(record_mirror(parts, slots_)),
      records_(record_lane(parts, slots_, mirror_.get())),
      corruption_check_(corruption_check(parts)),
      matrices_(matrix_executor(parts, slots_)),
      exchanges_(parts.exchanges, parts.mesh.ranks()),
      failure_(parts.plan.model(), parts.mesh, exchanges_),
      counters_(parts.plan.placement(), parts.timeline, trainer_.stream()),
      tensor_sums_(parts.plan, arithmetic_, parts.accounts, device_memory(parts).gpu),
      agreement_(parts.plan, parts.mesh, arithmetic_, tensor_sums_, parts.sums_micro_steps),
      ahead_(parts.gpu == nullptr ? std::make_unique<SendAhead>(parts.plan, slots_, parts.mesh) : nullptr),
      executor_({.plan = parts.plan,
                 .mesh = parts.mesh,
                 .slots = slots_,
                 .arithmetic = arithmetic_,
                 .agreement = agreement_,
                 .counters = counters_,
                 .failure = failure_,
                 .exchanges = exchanges_,
                 .records = records_.get(),
                 .check = corruption_check_.get(),
                 .matrices = matrices_.get(),
                 .ahead = ahead_.get()}),
      threads_(parts.gpu),
      scheduler_({.threads = threads_,
                  .trainer = trainer_,
                  .exchanges = exchanges_,
                  .counters = counters_,
                  .failure = failure_,
                  .gpu = parts.gpu,
                  .execute = [this](const IssuedOp& issued) { executor_.run(issued); },
                  .ahead = ahead_.get()}),
      off_plan_({.running = running_, .slots = slots_, .scheduler = scheduler_, .counters = counters_}),
      custom_update_({.plan = parts.plan,
                      .slots = slots_,
                      .scheduler = scheduler_,
                      .failure = failure_,
                      .is_checked = corruption_check_ != nullptr}),
      homes_(running_, slots_, arithmetic_),
      startup_({.running = running_,
                .slots = slots_,
                .arithmetic = arithmetic_,
                .homes = homes_,
                .records = records_.get()}),
      state_({.running = running_, .slots = slots_, .homes = homes_, .mesh = parts.mesh, .records = records_.get()}),
      offload_({.running = running_,
                .slots = slots_,
                .arithmetic = arithmetic_,
                .scheduler = scheduler_,
                .off_plan = off_plan_}) {
  scheduler_.follow_program(running_.program().ops);
  if (parts.gpu != nullptr || parts.allocator != nullptr) startup_.clear_device_memory();
}

// Lanes end before the objects that they use. Open uses cannot end any more, so operations that wait for them fail.
Engine::~Engine() {
  lives_.reset();
  scheduler_.abandon_uses();
  try {
    if (off_plan_.has_gradients()) parts_.mesh.abort("its training was ended in the middle of a step");
  } catch (const std::exception&) {
  }
  threads_.stop();
  if (records_) records_->finish();  // a late read would write to memory of a slot that is freed
  if (parts_.gpu == nullptr) return;
  try {  // no work may use the slots when they are freed
    parts_.gpu->finish();
    trainer_.synchronize();
  } catch (const Error&) {
  }
}

void Engine::require_usable() const {
  failure_.check();
  require(has_begun_, Code::out_of_order, [] {
    return Problem{.what = "cannot use the training: it has no parameters yet",
                   .needed = "start(), initialize() or resume() first"};
  });
  require(!offload_.is_offloaded(), Code::out_of_order, [] {
    return Problem{.what = "cannot use the training: it is offloaded from its device", .needed = "reload() first"};
  });
}

void Engine::require_not_begun() const {
  require(!has_begun_, Code::out_of_order, [] {
    return Problem{.what = "cannot begin the training: it has begun",
                   .needed = "start(), initialize() or resume() once, and change_state() after that"};
  });
}

void Engine::initialize(const ParameterSource& source) {
  require_not_begun();
  startup_.initialize(source);
  begin();
}

void Engine::resume(const ParameterSource& frozen) {
  require_not_begun();
  agreement_.set_steps(startup_.resume(frozen));
  if (records_) note_.assign(records_->note().begin(), records_->note().end());
  begin();
}

void Engine::begin() {
  scheduler_.run_entry(running_.program().entry, true);
  has_begun_ = true;
  number_step();
}

void Engine::set_note(std::span<const std::byte> note) {
  require(note.size() <= offload::max_note_bytes, Code::wrong_size, [&] {
    return Problem{.what = "cannot set the note: it does not fit into a commit",
                   .needed = fmt::format("{} bytes", note.size()),
                   .available = fmt::format("{} bytes", offload::max_note_bytes)};
  });
  note_.assign(note.begin(), note.end());
}

void Engine::set_steps(std::uint64_t steps) {
  agreement_.set_steps(steps);
  number_step();
}

Lease Engine::exact_parameters(std::size_t unit) {
  return acquire(unit, Phase::forward, parts_.plan.input().gathers_codes());
}

Lease Engine::acquire(std::size_t unit, Phase phase, bool exact) {
  require_acquirable(unit, phase);
  const Trace chain = visits_of(parts_.plan.model(), unit, phase, exact);
  scheduler_.issue_up_to_trainer();
  if (!scheduler_.uses_next(chain)) off_plan_.serve(chain);
  const std::size_t first = scheduler_.uses().next_number();
  std::vector<Lease::Memory> memory;
  while (memory.size() < chain.size()) {
    memory.push_back(memory_of(scheduler_.begin_use()));
  }
  off_plan_.remember(chain);
  const std::size_t end = first + memory.size();
  return Lease(std::move(memory), lives_, [this, first, end] {
    for (std::size_t use = first; use < end; ++use)
      scheduler_.end_use(use);
  });
}

void Engine::require_unit(std::size_t unit) const {
  const std::vector<Unit>& units = parts_.plan.model().units;
  require(unit < units.size(), Code::bad_argument, [&] {
    return Problem{.what = fmt::format("there is no unit {}", unit),
                   .needed = fmt::format("a unit below {}", units.size())};
  });
}

void Engine::require_acquirable(std::size_t unit, Phase phase) const {
  require_unit(unit);
  require_usable();
  const bool needs_options = parts_.plan.input().schedule.update_in_backward && phase == Phase::backward;
  require(!needs_options || prepared(), Code::out_of_order, [] {
    return Problem{.what = "cannot begin a backward pass that updates parameters: there are no options for its updates",
                   .needed = "prepare() first"};
  });
  const bool sums_once = parts_.plan.input().placement.reduction == Reduction::boundary;
  require(!norm_is_known_ || phase != Phase::backward || !sums_once, Code::out_of_order, [] {
    return Problem{.what = "cannot add gradients: groups of ranks have summed theirs for the norm",
                   .needed = "norms and clipping after the last backward pass of a step, or Reduction::each",
                   .remedy = "Make the step first, or discard its gradients."};
  });
}

Lease::Memory Engine::memory_of(const Op& use) const {
  const Unit& unit = parts_.plan.model().units[use.unit];
  return {.unit = &unit,
          .layout = &parts_.plan.layout().units[use.unit],
          .parameters = slots_.view(use.from, unit.dtype),
          .backward = use.phase == Phase::backward,
          .gradients = use.to.exists() ? slots_.view(use.to, unit.dtype) : View{}};
}

// Throws before anything changes: a rank that stopped after the agreement would leave the others a step ahead.
void Engine::prepare(const StepOptions& options) {
  require_usable();
  agreement_.check(options);
  if (options.update) custom_update_.require_possible();
  before_write(RunWrite::step);
  agreement_.prepare(options);
  if (parts_.plan.input().schedule.update_in_backward) scheduler_.run().numbers = agreement_.numbers_before_norm();
}

void Engine::leave_out(std::size_t unit, std::size_t tensor) {
  require_usable();
  require_unit(unit);
  const std::vector<Tensor>& tensors = parts_.plan.model().units[unit].tensors;
  require(tensor < tensors.size() && !tensors[tensor].frozen, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot leave out tensor {}: it is not trained", tensor),
                   .where = fmt::format("unit {}", parts_.plan.model().units[unit].name),
                   .needed = "a trained tensor of the unit"};
  });
  parts_.plan.input().schedule.update_in_backward ? scheduler_.run().numbers.leave_out(unit, tensor)
                                                  : agreement_.leave_out(unit, tensor);
}

void Engine::reach_agreement() {
  require(scheduler_.uses().oldest() == nullptr, Code::out_of_order, [] {
    return Problem{.what = "cannot step: a lease of a unit has not ended", .needed = "the end of all leases"};
  });
  scheduler_.issue_up_to_trainer();
  if (!scheduler_.is_at_agreement()) off_plan_.serve_step();
  trainer_.synchronize();
}

void Engine::complete_gradients(std::optional<std::size_t> micro_steps) {
  require_usable();
  require(!parts_.plan.input().schedule.update_in_backward, Code::out_of_order, [] {
    return Problem{.what = "cannot compute the norm: parameters are updated before it is known",
                   .needed = "updates after the backward pass"};
  });
  agreement_.check_accumulated(off_plan_.visited(), micro_steps);
  reach_agreement();
  norm_is_known_ = true;
  scheduler_.wait_for_issued();
}

double Engine::gradient_norm(double loss_scale, std::optional<std::size_t> micro_steps) {
  complete_gradients(micro_steps);
  return agreement_.norm(scheduler_.rest().front(), loss_scale, micro_steps);
}

std::vector<std::vector<double>> Engine::tensor_norms(double loss_scale, std::optional<std::size_t> micro_steps) {
  complete_gradients(micro_steps);
  return agreement_.tensor_norms(scheduler_.list(), loss_scale, micro_steps);
}

void Engine::visit_gradients(const GradientVisitor& visit, std::optional<std::size_t> micro_steps) {
  complete_gradients(micro_steps);
  tensor_sums_.visit(scheduler_.list(), scheduler_.rest().front(), slots_, visit);
}

StepResult Engine::step(const StepOptions& options) {
  require(!parts_.plan.input().schedule.update_in_backward, Code::out_of_order, [] {
    return Problem{.what = "cannot step with options: the updates are made already",
                   .needed = "prepare(options) before backward, and step() without any"};
  });
  prepare(options);
  return step();
}

StepResult Engine::step() {
  require_usable();
  require(prepared(), Code::out_of_order,
          [] { return Problem{.what = "cannot step: there are no options", .needed = "step(options)"}; });
  agreement_.check_accumulated(off_plan_.visited());
  reach_agreement();
  StepRun& run = scheduler_.run();
  const std::size_t agreement = scheduler_.position();
  if (agreement_.has_custom_update()) custom_update_.run(agreement_.take_custom_update());
  run.note = note_;
  run.round = round_;
  scheduler_.issue_rest();
  scheduler_.wait_for(agreement);
  agreement_.end_step(run.numbers.number);
  off_plan_.end_step();
  scheduler_.begin_step();
  number_step();
  norm_is_known_ = false;
  run.result.metrics = counters_.end_step(metrics());
  return run.result;
}

void Engine::wait_for_parameters(std::size_t unit) {
  require_usable();
  require_unit(unit);
  scheduler_.wait_for_parameters(unit);
}

void Engine::wait_for_commit() {
  require_usable();
  scheduler_.wait_for_last_step();
}

void Engine::finish() {
  require_usable();
  scheduler_.finish();
}

void Engine::offload(bool parameters, const AgreeOnMemory& agree) {
  require_usable();
  const bool is_in_step = scheduler_.uses().oldest() != nullptr || off_plan_.has_gradients() || prepared();
  require(!is_in_step, Code::out_of_order, [] {
    return Problem{.what = "cannot offload the training: it is in the middle of a step",
                   .needed = "step() after each backward pass, and the end of all leases"};
  });
  offload_.offload(parameters, agree);
}

void Engine::reload(const AgreeOnMemory& agree) { offload_.reload(agree); }

void Engine::visit_state(const TileVisitor& look, const TileFilter& which) {
  finish();
  state_.look(look, which);
}

// The entry gathers parameters and reads kept records again, from the changed state.
void Engine::change_state(const TileVisitor& change, const std::function<void()>& agree) {
  parameters_changed();
  before_write(RunWrite::change);
  state_.change(change, agree, [this] { return CommittedState{steps(), note_, round_of_change()}; });
  off_plan_.forget_gathered();
  scheduler_.run_entry(running_.program().entry, true);
}

// A change that belongs to no round of its own is one of the last round's state.
JointRound Engine::round_of_change() const { return round_.exists() || !records_ ? round_ : records_->round(); }

void Engine::before_write(RunWrite write) const {
  if (parts_.before_write && records_ && records_->keeps_run()) parts_.before_write(write);
}

void Engine::parameters_changed() {
  finish();
  if (corruption_check_) corruption_check_->forget();
}

Metrics Engine::metrics() const {
  Metrics metrics = counters_.totals();
  metrics.verified = corruption_check_ ? corruption_check_->places() : 0;
  const SentBytes sent = parts_.mesh.sent() + (mirror_ ? mirror_->sent() : SentBytes{});
  metrics.sent_inside = sent.inside;
  metrics.sent_across = sent.across;
  metrics.memory = running_.memory();
  return metrics;
}

}  // namespace ballast
