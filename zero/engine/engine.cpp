#include "zero/engine/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

namespace ballast {
namespace {

DeviceMemory device_memory(const EngineParts& parts) {
  return {.gpu = parts.gpu == nullptr ? std::nullopt : std::optional(parts.gpu->gpu()),
          .allocator = parts.allocator,
          .shared = parts.mesh.gather->shared_memory()};
}

void check(const Model& model, const StepOptions& options) {
  for (const Unit& unit : model.units) {
    for (const Tensor& tensor : unit.tensors) {
      require(tensor.frozen || tensor.group < options.groups.size(), Code::bad_argument, [&] {
        return Problem{.what = fmt::format("a step was asked for with {} parameter groups", options.groups.size()),
                       .where = fmt::format("unit {}, tensor {}", unit.name, tensor.name),
                       .needed = fmt::format("group {}", tensor.group)};
      });
    }
  }
  for (const optim::Rule& rule : options.groups) {
    optim::check(rule);
    require(std::holds_alternative<optim::External>(rule) == static_cast<bool>(options.update), Code::bad_argument, [] {
      return Problem{
          .what = "updates of a trainer's own were given for a rule of the library, or none for the rule External",
          .needed = "StepOptions::update for External, and for no other rule"};
    });
  }
}

}  // namespace

Engine::Engine(const EngineParts& parts)
    : parts_(parts),
      input_(parts.plan.input()),
      slots_(program(), parts.accounts, device_memory(parts), parts.queues),
      updates_in_backward_(input_.schedule.update_in_backward) {
  require(parts.records != nullptr || parts.plan.tiles_on_drive() == 0, Code::bad_argument, [] {
    return Problem{.what = "a program that keeps state on a drive got no records to keep it in",
                   .needed = "EngineParts::records"};
  });
  if (parts.records != nullptr) records_.emplace(parts.plan, slots_, *parts.records);
  if (parts.verify > 0) corruption_check_.emplace(parts.plan, parts.verify, parts.mesh.rank());
  if (parts.gpu != nullptr) stream_.emplace(Stream::wrap(parts.stream, parts.gpu->gpu()));
  for (std::size_t i = 0; i < lane_count; ++i) {
    const Lane lane = static_cast<Lane>(i);
    const bool on_gpu = parts.gpu != nullptr && works_on_device(lane);
    arithmetic_[i].emplace(
        parts.plan, slots_,
        on_gpu ? ExecContext(parts.gpu->backend(lane), parts.gpu->stream(lane)) : ExecContext(parts.backend));
    if (lane != Lane::compute) lanes_[i] = std::make_unique<LaneThread>();
    if (on_gpu) lanes_[i]->add([gpu = parts.gpu->gpu()] { device::choose_gpu(gpu); }).wait();
  }
  if (stream_) entry_.clock.emplace(stream_->gpu());
  for (Round& round : rounds_) {
    if (stream_) round.clock.emplace(stream_->gpu());
  }
  begin_program();
  if (parts.gpu != nullptr || parts.allocator != nullptr) clear_device_memory();
}

// As the host's is from the beginning.
void Engine::clear_device_memory() const {
  const ExecContext& context = arithmetic(Lane::upload).context();
  const std::vector<Slot>& slots = program().slots;
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    const std::size_t bytes = slots[slot].bytes;
    if (slots[slot].tier == Tier::device && bytes > 0) context.zero(slots_.data({slot, 0, bytes}), bytes);
  }
  context.finish();
}

Engine::~Engine() {
  open_uses_.clear();  // who waits for them fails
  try {                // which nobody can finish
    if (has_gradients()) parts_.mesh.abort("its training was ended in the middle of a step");
  } catch (const std::exception&) {
  }
  for (std::unique_ptr<LaneThread>& lane : lanes_) {
    lane.reset();
  }
  if (!stream_) return;
  try {  // nothing may be at work in the slots when they are given back
    parts_.gpu->finish();
    stream_->synchronize();
  } catch (const Error&) {
  }
}

const OpStatus& Engine::awaited(const Wait& wait, const Round& round) const {
  if (!wait.of_last_round) return round.ops[wait.op];
  const auto number = static_cast<std::size_t>(&round - rounds_.data());
  return rounds_[(number + rounds_.size() - 1) % rounds_.size()].ops[wait.op];
}

void Engine::require_alive() const {
  const std::lock_guard lock(error_mutex_);
  if (error_) std::rethrow_exception(error_);
  require(began_, Code::out_of_order, [] {
    return Problem{.what = "training was to begin without parameters", .needed = "initialise() or resume() first"};
  });
  require(!away_, Code::out_of_order, [] {
    return Problem{.what = "a training was used that has left its device",
                   .needed = "return_to_device() first; in Python, optimizer.reload()"};
  });
}

void Engine::issue(const Op& op, OpStatus& status, Round& round) {
  Issued issued{op, status, round};
  for (const Wait& wait : op.after) {
    issued.after.push_back(&awaited(wait, round));
  }
  const bool in_turn = stream_ && (op.kind == OpKind::gather || op.kind == OpKind::reduce);
  if (in_turn) issued.turn = sequencer_.next_ticket();
  status.begun = lanes_[static_cast<std::size_t>(op.lane)]->add([this, issued = std::move(issued)] { run(issued); });
}

void Engine::issue_up_to_trainer() {
  for (; next_ < list().size(); ++next_) {
    const Op& op = list()[next_];
    if (op.kind == OpKind::use || op.kind == OpKind::agree) return;
    issue(op, now().ops[next_], now());
  }
}

Lease Engine::lend(std::size_t unit, Phase phase) {
  const std::vector<Unit>& units = parts_.plan.model().units;
  require(unit < units.size(), Code::bad_argument, [&] {
    return Problem{.what = fmt::format("the trainer asked for unit {}", unit),
                   .needed = fmt::format("a unit below {}", units.size())};
  });
  require_alive();
  require_prepared(phase);
  require(!norm_is_known_ || phase != Phase::backward, Code::out_of_order, [] {
    return Problem{.what = "gradients came after their norm was asked for", .needed = "step() between the two"};
  });
  const Trace chain = visits_of(parts_.plan.model(), unit, phase);
  issue_up_to_trainer();
  if (!is_next(chain)) serve(chain);
  const std::size_t first = first_open_use_ + open_uses_.size();
  std::vector<Lease::Memory> memory;
  while (memory.size() < chain.size()) {
    memory.push_back(take());
  }
  remember(chain);
  const std::size_t end = first + memory.size();
  return Lease(std::move(memory), [this, first, end] {
    for (std::size_t use = first; use < end; ++use)
      give_back(use);
  });
}

// Long evaluations leave the order too: uses in forward are over when the next list begins, and need not be compiled again.
void Engine::remember(const Trace& chain) {
  visited_.insert(visited_.end(), chain.begin(), chain.end());
  const bool counts = !departed_ || chain.back().phase == Phase::backward;
  if (counts) so_far_.visits.insert(so_far_.visits.end(), chain.begin(), chain.end());
}

// The trainer's next turn.
Lease::Memory Engine::take() {
  issue_up_to_trainer();
  const Op& op = list()[next_];
  const ExecContext here = stream_ ? ExecContext(parts_.backend, *stream_) : ExecContext(parts_.backend);
  for (const Wait& wait : op.after) {
    wait_exposed(op.phase, list()[wait.op].lane, [&] { awaited(wait, now()).wait_in(here); });
  }
  begin_use(op, now().ops[next_]);
  ++next_;
  const Unit& unit = parts_.plan.model().units[op.unit];
  return {.unit = &unit,
          .layout = &parts_.plan.layout().units[op.unit],
          .parameters = slots_.view(op.from, unit.dtype),
          .backward = op.phase == Phase::backward,
          .gradients = op.to.exists() ? slots_.view(op.to, unit.dtype) : View{}};
}

void Engine::begin_use(const Op& op, OpStatus& status) {
  std::shared_ptr<GpuSpan> on_gpu = stream_ ? std::make_shared<GpuSpan>(stream_->gpu()) : nullptr;
  if (on_gpu) on_gpu->begin.record(*stream_);
  const OpenUse& use = open_uses_.emplace_back(OpenUse{&op, std::chrono::steady_clock::now(), on_gpu});
  status = {.begun = use.promise.completion(), .on_gpu = std::move(on_gpu)};
}

void Engine::require_prepared(Phase phase) const {
  require(!updates_in_backward_ || phase != Phase::backward || prepared_, Code::out_of_order, [] {
    return Problem{.what = "a backward pass that updates parameters was begun without the options of its updates",
                   .needed = "prepare() before it"};
  });
}

// Uses end in the order in which they began: what waits for one may count on those before it.
void Engine::give_back(std::size_t use) {
  OpenUse& ended = open_uses_[use - first_open_use_];
  ended.ended = true;
  if (!ended.on_gpu) count(*ended.op, ended.begin, std::chrono::steady_clock::now());
  while (!open_uses_.empty() && open_uses_.front().ended) {
    if (open_uses_.front().on_gpu) open_uses_.front().on_gpu->end.record(*stream_);
    open_uses_.front().promise.finish();
    open_uses_.pop_front();
    ++first_open_use_;
  }
  issue_up_to_trainer();
}

// Before anything changes: past the agreement a rank that stops would leave the others a step ahead.
void Engine::prepare(const StepOptions& options) {
  require_alive();
  check(parts_.plan.model(), options);
  require(!updates_in_backward_ || options.max_norm == optim::no_clipping, Code::bad_argument, [] {
    return Problem{.what = "clipping was asked for where parameters are updated before the norm is known",
                   .needed = "no max_norm, or updates after the backward pass"};
  });
  if (options.update) require_tiles_in_memory();
  rules_.assign(options.groups.begin(), options.groups.end());
  begun_at_.assign(options.begun_at.begin(), options.begun_at.end());
  options_ = {rules_, options.max_norm, options.loss_scale, options.discard, begun_at_, options.update};
  prepared_ = true;
  if (updates_in_backward_) now().numbers = numbers_of(decide({}));
}

StepResult Engine::step(const StepOptions& options) {
  require(!updates_in_backward_, Code::out_of_order, [] {
    return Problem{.what = "options came with a step whose updates are made already",
                   .needed = "prepare(options) before backward, and step() without any"};
  });
  prepare(options);
  return step();
}

void Engine::come_to_agreement() {
  require(open_uses_.empty(), Code::out_of_order, [] {
    return Problem{.what = "a step was asked for before every unit was given back", .needed = "the end of all leases"};
  });
  issue_up_to_trainer();
  if (!is_at_agreement()) serve_step();
  wait_for_trainer();
}

// What a trainer has in its stream after its leases may look at parameters that are kept whole, or have changed them: nobody
// may write to them or read them before.
void Engine::wait_for_trainer() const {
  if (stream_) stream_->synchronize();
}

double Engine::gradient_norm(double loss_scale) {
  require_alive();
  require(!updates_in_backward_, Code::out_of_order, [] {
    return Problem{.what = "the norm was asked for where parameters are updated before it is known",
                   .needed = "updates after the backward pass"};
  });
  come_to_agreement();
  norm_is_known_ = true;
  const Round& round = now();
  wait_exposed(Phase::step, Lane::reduce, [&] {
    for (std::size_t op = next_; op-- > 0;) {
      round.ops[op].wait();
    }
  });
  const Op& agreement = list()[next_];
  kernels::ExactSum squares;
  if (agreement.to.exists()) kernels::merge(squares, arithmetic(agreement.lane).read_sum(agreement.to));
  if (agreement.state.exists()) kernels::merge(squares, arithmetic(Lane::host).read_sum(agreement.state));
  options_.loss_scale = loss_scale;
  return decide(sum_over_model(squares)).norm;
}

std::vector<std::vector<double>> Engine::tensor_norms(double loss_scale) {
  gradient_norm(loss_scale);
  const Plan& plan = parts_.plan;
  const std::vector<Unit>& units = plan.model().units;
  std::vector<std::size_t> begins(units.size());  // among all tensors
  std::size_t tensors = 0;
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    begins[unit] = std::exchange(tensors, tensors + units[unit].tensors.size());
  }
  std::vector<kernels::ExactSum> squares(tensors);
  for (std::size_t i = 0; i < next_; ++i) {
    const Op& op = list()[i];
    if (op.kind == OpKind::norm) add_squares_by_tensor(op, std::span(squares).subspan(begins[op.unit]));
  }
  sum_over_shards(squares);
  std::vector<std::vector<double>> norms(units.size());
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    for (const kernels::ExactSum& sum : std::span(squares).subspan(begins[unit], units[unit].tensors.size())) {
      norms[unit].push_back(decide(sum).norm);
    }
  }
  return norms;
}

void Engine::add_squares_by_tensor(const Op& norm, std::span<kernels::ExactSum> squares) const {
  const UnitLayout& layout = parts_.plan.layout().units[norm.unit];
  for (const TensorPart& part : tensors_in(parts_.plan.model().units[norm.unit], layout, layout.trained,
                                           parts_.mesh.reduce->rank(), {0, layout.trained.shard})) {
    kernels::merge(squares[part.tensor], arithmetic(norm.lane).squares_of(norm, {part.in_shard, part.range.count}));
  }
}

StepResult Engine::step() {
  require_alive();
  require(prepared_, Code::out_of_order,
          [] { return Problem{.what = "a step was asked for without options", .needed = "step(options)"}; });
  come_to_agreement();
  Round& round = now();
  const std::size_t agreement = next_;
  if (options_.update) let_trainer_update();
  for (; next_ < list().size(); ++next_) {
    issue(list()[next_], round.ops[next_], round);
  }
  wait_exposed(Phase::step, list()[agreement].lane, [&] { round.ops[agreement].wait(); });
  steps_ = round.numbers.number;
  departed_ ? return_to_program() : last_departed_.clear();
  begin_round();
  const Metrics now = metrics();
  round.result.metrics = now.since(std::exchange(at_last_step_, now));
  own_seconds_ = round.result.metrics.own_seconds();
  return round.result;
}

// What the next round reuses has to be over; nearly always it is.
void Engine::begin_round() {
  wait_exposed(Phase::step, Lane::disk, [&] { wait_all(last()); });
  count_on_gpu(last());
  ++round_;
  if (stream_) now().clock->set();
  next_ = 0;
  so_far_ = {};
  visited_.clear();
  prepared_ = norm_is_known_ = false;
}

// From the end, so that this thread is woken once for each lane, not once for each operation.
void Engine::wait_all(const Round& round) const {
  for (std::size_t op = round.ops.size(); op-- > 0;) {
    round.ops[op].wait();
  }
}

void Engine::finish() {
  require_alive();
  require(open_uses_.empty(), Code::out_of_order, [] {
    return Problem{.what = "what is under way was to be finished before every unit was given back",
                   .needed = "the end of all leases"};
  });
  wait_for_trainer();
  wait_exposed(Phase::step, Lane::disk, [&] {
    wait_all(last());
    wait_all(now());
  });
  count_on_gpu(last());
  count_on_gpu(now());
}

}  // namespace ballast
