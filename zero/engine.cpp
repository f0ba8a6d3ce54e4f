#include "zero/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

namespace ballast {
namespace {

bool updates_before_agreement(const Program& program) {
  const auto agreement = std::ranges::find(program.ops, OpKind::agree, &Op::kind);
  return std::find_if(program.ops.begin(), agreement, [](const Op& op) { return op.kind == OpKind::update; }) !=
         agreement;
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
  }
}

}  // namespace

Engine::Engine(const EngineParts& parts)
    : parts_(parts),
      program_(parts.plan.program()),
      slots_(program_, parts.accounts, parts.queues),
      arithmetic_(parts.plan, slots_, parts.backend),
      updates_in_backward_(updates_before_agreement(program_)) {
  require(parts.records != nullptr || parts.plan.tiles_on_drive() == 0, Code::bad_argument, [] {
    return Problem{.what = "a program that keeps state on a drive got no records to keep it in",
                   .needed = "EngineParts::records"};
  });
  if (parts.records != nullptr) records_.emplace(parts.plan, slots_, *parts.records);
  for (std::size_t lane = 0; lane < lane_count; ++lane) {
    if (static_cast<Lane>(lane) != Lane::compute) lanes_[lane] = std::make_unique<LaneThread>();
  }
  for (Round& round : rounds_) {
    round.ops.resize(program_.ops.size());
  }
}

Engine::~Engine() {
  open_uses_.clear();  // who waits for them fails
}

void Engine::Progress::wait() const {
  begun.wait();
  if (read) read->completion().wait();
  written.wait();
}

const Engine::Progress& Engine::awaited(const Wait& wait, const Round& round) const {
  const Round& other = &round == &rounds_[0] ? rounds_[1] : rounds_[0];
  return (wait.of_last_round ? other : round).ops[wait.op];
}

void Engine::require_alive() const {
  const std::lock_guard lock(error_mutex_);
  if (error_) std::rethrow_exception(error_);
  require(began_, Code::out_of_order, [] {
    return Problem{.what = "training was to begin without parameters", .needed = "initialise() or resume() first"};
  });
}

void Engine::wait_exposed(Phase phase, Lane lane, const std::function<void()>& wait) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    wait();
  } catch (...) {
    require_alive();  // throws the first error, which may be another
    throw;
  }
  const auto end = std::chrono::steady_clock::now();
  const double seconds = std::chrono::duration<double>(end - begin).count();
  exposed_[static_cast<std::size_t>(phase)] += seconds;
  stalls_[static_cast<std::size_t>(lane)] += seconds;
  if (parts_.timeline != nullptr) parts_.timeline->add_wait(phase, begin, end);
}

void Engine::count(const Op& op, Timeline::Time begin, Timeline::Time end) {
  Counter& counter = counters_[static_cast<std::size_t>(op.lane)];
  counter.bytes += bytes_moved(op, parts_.plan.placement());
  counter.nanoseconds += (end - begin).count();
  if (parts_.timeline != nullptr) parts_.timeline->add(op, begin, end);
}

void Engine::issue(const Op& op, Progress& progress, Round& round) {
  std::vector<const Progress*> after;
  for (const Wait& wait : op.after) {
    after.push_back(&awaited(wait, round));
  }
  LaneThread& lane = *lanes_[static_cast<std::size_t>(op.lane)];
  progress.begun =
      lane.add([this, &op, &progress, &round, after = std::move(after)] { run(op, progress, round, after); });
}

void Engine::issue_up_to_trainer() {
  for (; next_ < program_.ops.size(); ++next_) {
    const Op& op = program_.ops[next_];
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
  const std::size_t first = first_open_use_ + open_uses_.size();
  std::vector<Lease::Memory> memory;
  for (const Visit& visit : visits_of(parts_.plan.model(), unit, phase)) {
    memory.push_back(take(visit));
  }
  const std::size_t end = first + memory.size();
  return Lease(std::move(memory), [this, first, end] {
    for (std::size_t use = first; use < end; ++use)
      give_back(use);
  });
}

// Up to the trainer's next turn, which must be the one it takes.
Lease::Memory Engine::take(const Visit& visit) {
  require_alive();
  issue_up_to_trainer();
  const std::vector<Unit>& units = parts_.plan.model().units;
  const Op& op = program_.ops[next_];
  require(op.kind == OpKind::use && op.unit == visit.unit && op.phase == visit.phase, Code::out_of_order, [&] {
    return Problem{
        .what = fmt::format("the trainer asked for unit {} in {}", units[visit.unit].name, name(visit.phase)),
        .needed = op.kind == OpKind::use ? fmt::format("unit {} in {}", units[op.unit].name, name(op.phase))
                                         : "a step, as all units have been used"};
  });
  require_prepared(op);
  for (const Wait& wait : op.after) {
    wait_exposed(op.phase, program_.ops[wait.op].lane, [&] { awaited(wait, now()).wait(); });
  }
  now().ops[next_] = {.begun =
                          open_uses_.emplace_back(OpenUse{&op, std::chrono::steady_clock::now()}).promise.completion()};
  ++next_;
  const DType dtype = units[op.unit].dtype;
  return {.unit = &units[op.unit],
          .layout = &parts_.plan.layout().units[op.unit],
          .parameters = slots_.view(op.from, dtype),
          .backward = op.phase == Phase::backward,
          .gradients = op.to.exists() ? slots_.view(op.to, dtype) : View{}};
}

void Engine::require_prepared(const Op& op) const {
  require(!updates_in_backward_ || op.phase != Phase::backward || prepared_, Code::out_of_order, [] {
    return Problem{.what = "a backward pass that updates parameters was begun without the options of its updates",
                   .needed = "prepare() before it"};
  });
}

// Uses end in the order in which they began: what waits for one may count on those before it.
void Engine::give_back(std::size_t use) {
  OpenUse& ended = open_uses_[use - first_open_use_];
  ended.ended = true;
  count(*ended.op, ended.begin, std::chrono::steady_clock::now());
  while (!open_uses_.empty() && open_uses_.front().ended) {
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
  rules_.assign(options.groups.begin(), options.groups.end());
  options_ = {rules_, options.max_norm, options.loss_scale};
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

StepResult Engine::step() {
  require_alive();
  issue_up_to_trainer();
  const std::size_t agreement = next_;
  const Op& op = program_.ops[agreement];
  require(op.kind == OpKind::agree && open_uses_.empty(), Code::out_of_order, [&] {
    return Problem{.what = "a step was asked for before every unit was used and given back",
                   .needed = op.kind == OpKind::use
                                 ? fmt::format("unit {} first", parts_.plan.model().units[op.unit].name)
                                 : "the end of all leases"};
  });
  require(prepared_, Code::out_of_order,
          [] { return Problem{.what = "a step was asked for without options", .needed = "step(options)"}; });
  Round& round = now();
  for (; next_ < program_.ops.size(); ++next_) {
    issue(program_.ops[next_], round.ops[next_], round);
  }
  wait_exposed(Phase::step, op.lane, [&] { round.ops[agreement].wait(); });
  steps_ = round.numbers.number;
  begin_round();
  const Metrics now = metrics();
  round.result.metrics = now.since(std::exchange(at_last_step_, now));
  return round.result;
}

// What the next round reuses has to be over; nearly always it is.
void Engine::begin_round() {
  wait_exposed(Phase::step, Lane::disk, [&] { wait_all(last()); });
  ++round_;
  next_ = 0;
  prepared_ = false;
}

// From the end, so that this thread is woken once for each lane, not once for each operation.
void Engine::wait_all(const Round& round) const {
  for (std::size_t op = round.ops.size(); op-- > 0;) {
    round.ops[op].wait();
  }
}

void Engine::finish() {
  require_alive();
  wait_exposed(Phase::step, Lane::disk, [&] {
    wait_all(last());
    wait_all(now());
  });
}

Metrics Engine::metrics() const {
  Metrics metrics{.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - made_).count(),
                  .stalls = stalls_,
                  .exposed = exposed_};
  for (std::size_t lane = 0; lane < lane_count; ++lane) {
    metrics.bytes[lane] = counters_[lane].bytes;
    metrics.busy[lane] = static_cast<double>(counters_[lane].nanoseconds) * 1e-9;
  }
  return metrics;
}

}  // namespace ballast
