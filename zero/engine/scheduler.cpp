#include "zero/engine/scheduler.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>

namespace ballast {
namespace {

[[noreturn]] void rethrow_from(const Op& op, const Model& model) {
  try {
    throw;
  } catch (const Error& error) {
    const std::string unit = op.unit == none ? "" : fmt::format("unit {}, ", model.units[op.unit].name);
    Problem problem = error.problem();
    problem.where = fmt::format("{}{} of {}{}{}", unit, name(op.kind), name(op.phase),
                                problem.where.empty() ? "" : "; ", problem.where);
    fail(error.code(), problem);
  }
}

std::string text_of_current_exception() {
  try {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an unknown error";
  }
}

bool are_free(const std::vector<const OpStatus*>& ops) {
  return std::ranges::all_of(ops, [](const OpStatus* op) { return op->is_free; });
}

bool is_exchange(const Op& op) {
  return op.kind == OpKind::gather || op.kind == OpKind::reduce || op.kind == OpKind::collect ||
         op.kind == OpKind::distribute;
}

bool is_trainers_turn(const Op& op) { return op.kind == OpKind::use || op.kind == OpKind::agree; }

}  // namespace

void FirstFailure::check() const {
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

void FirstFailure::fail(const Op& op) {
  exchanges_.cancel();
  {
    const std::lock_guard lock(mutex_);
    if (error_) throw;  // this operation waited for the one that failed, or was aborted with it
  }
  try {
    rethrow_from(op, model_);
  } catch (...) {
    {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
    mesh_.abort(text_of_current_exception());
    throw;
  }
}

void TrainerUses::begin(const Op& op, OpStatus& status) {
  const Stream* const stream = trainer_.stream();
  const bool is_marked = stream != nullptr && (status.is_awaited || counters_.times_gpu());
  if (is_marked && !status.on_gpu) status.on_gpu = std::make_shared<GpuSpan>(stream->gpu(), counters_.times_gpu());
  if (status.on_gpu) {
    status.on_gpu->counted = false;
    status.on_gpu->mark_begin(*stream);
  }
  const Use& use = open_.emplace_back(Use{&op, &status, std::chrono::steady_clock::now(), status.on_gpu});
  status.in_stream = stream != nullptr;
  status.begun = use.promise.completion();
  status.is_free = false;
}

void TrainerUses::end(std::size_t number) {
  Use& ended = open_[number - first_];
  ended.ended = true;
  if (trainer_.stream() == nullptr) counters_.count(*ended.op, ended.begin, std::chrono::steady_clock::now());
  while (!open_.empty() && open_.front().ended) {
    if (open_.front().on_gpu) open_.front().on_gpu->end.record(*trainer_.stream());
    open_.front().status->is_free = true;
    open_.front().promise.finish();
    open_.pop_front();
    ++first_;
  }
}

void FreedOps::add(const IssuedOp& issued) {
  const Held op{&issued.status, issued.after, issued.op.lane, issued.takes_turns};
  std::size_t& held_before = held_in_lane_[static_cast<std::size_t>(op.lane)];
  if (held_before == 0 && are_free(op.after)) return free(op);
  op.status->is_free = false;
  ++held_before;
  held_.push_back(op);
}

void FreedOps::look() {
  std::deque<Held> still_held;
  std::array<std::size_t, lane_count> in_lane{};
  for (const Held& op : held_) {
    std::size_t& held_before = in_lane[static_cast<std::size_t>(op.lane)];
    if (held_before == 0 && are_free(op.after)) {
      free(op);
      continue;
    }
    ++held_before;
    still_held.push_back(op);
  }
  held_ = std::move(still_held);
  held_in_lane_ = in_lane;
}

void FreedOps::free(const Held& op) {
  op.status->is_free = true;
  if (op.takes_turns) exchanges_.add(op.status);
}

Scheduler::Scheduler(const Parts& parts)
    : parts_(parts),
      uses_(parts.trainer, parts.counters),
      runs_(parts.counters.times_gpu() ? parts.trainer.stream() : nullptr),
      freed_(parts.exchanges) {
  if (parts.counters.times_gpu()) entry_.clock.emplace(parts.trainer.stream()->gpu());
}

void Scheduler::follow_program(const std::vector<Op>& list) { runs_.follow(list); }

void Scheduler::follow_in_this_step(const std::vector<Op>& list, const OffPlanPosition& position) {
  run().follow(list);
  run().position = position;
  next_ = 0;
  issue_up_to_trainer();
}

void Scheduler::run_entry(const std::vector<Op>& list, bool with_records) {
  if (entry_.clock) entry_.clock->set();
  entry_.follow(list);
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (with_records || list[i].kind != OpKind::read) issue(list[i], entry_.ops[i], entry_);
  }
  entry_.wait();
  parts_.counters.count_on_gpu(entry_);
  for (std::size_t i = 0; i < list.size();
       ++i) {  // records that stay in memory; those that were used have been checked
    if (list[i].kind == OpKind::read) entry_.ops[i].check_record();
  }
  runs_.set_clocks();
}

const OpStatus& Scheduler::awaited(const Wait& wait, const StepRun& run) const {
  return wait.is_last_steps ? runs_.before(run).ops[wait.op] : run.ops[wait.op];
}

void Scheduler::issue(const Op& op, OpStatus& status, StepRun& run) {
  IssuedOp issued{op, status, run};
  for (const Wait& wait : op.after) {
    issued.after.push_back(&awaited(wait, run));
  }
  if (parts_.trainer.stream() != nullptr) {
    issued.takes_turns = is_exchange(op);
    freed_.add(issued);
  }
  if (parts_.ahead != nullptr) parts_.ahead->issued(issued);
  status.begun = parts_.threads.of(op.lane).add([this, issued = std::move(issued)] { parts_.execute(issued); });
}

const Op& Scheduler::issue_next() {
  const Op& op = list()[next_];
  issue(op, run().ops[next_], run());
  ++next_;
  return op;
}

void Scheduler::issue_up_to_trainer() {
  while (next_ < list().size() && !is_trainers_turn(list()[next_])) {
    issue_next();
  }
}

void Scheduler::issue_rest() {
  while (next_ < list().size()) {
    issue_next();
  }
}

bool Scheduler::uses_next(const Trace& chain) const {
  auto visit = chain.begin();
  for (std::size_t i = next_; i < list().size() && visit != chain.end(); ++i) {
    const Op& op = list()[i];
    if (op.kind == OpKind::agree) return false;
    if (op.kind != OpKind::use) continue;
    if (op.unit != visit->unit || op.phase != visit->phase || op.exact != visit->exact) return false;
    ++visit;
  }
  return visit == chain.end();
}

const Op& Scheduler::begin_use() {
  issue_up_to_trainer();
  const Op& op = list()[next_];
  const ExecContext trainer = parts_.trainer.context();
  for (const Wait& needed : op.after) {
    wait(op.phase, list()[needed.op].lane, [&] { awaited(needed, run()).wait_in(trainer); });
  }
  uses_.begin(op, run().ops[next_++]);
  return op;
}

void Scheduler::end_use(std::size_t use) {
  const Op& op = uses_.op(use);
  try {
    uses_.end(use);
    freed_.look();
    issue_up_to_trainer();
  } catch (...) {
    parts_.failure.fail(op);
  }
}

void Scheduler::wait(Phase phase, Lane lane, const std::function<void()>& wait) {
  try {
    parts_.counters.wait(run(), phase, lane, wait);
  } catch (...) {
    parts_.failure.check();
    throw;
  }
}

void Scheduler::wait_for(std::size_t position) {
  wait(Phase::step, list()[position].lane, [&] { run().ops[position].wait(); });
}

void Scheduler::wait_for_inputs_of_next() {
  const Op& op = list()[next_];
  for (const Wait& needed : op.after) {
    wait(op.phase, list()[needed.op].lane, [&] {
      awaited(needed, run()).wait();
      if (!needed.is_last_steps) run().ops[needed.op].accept_record();
    });
  }
}

// If only a part of a list was issued, the end of its last operation in a lane may not be marked. So this waits for the
// streams.
void Scheduler::wait_for_issued() {
  wait(Phase::step, Lane::reduce, [&] {
    for (std::size_t op = next_; op-- > 0;) {
      run().ops[op].wait();
    }
    if (parts_.gpu != nullptr) parts_.gpu->finish();
  });
}

void Scheduler::wait_for_parameters(std::size_t unit) {
  const StepRun& last = runs_.last();
  for (std::size_t i = 0; i < last.ops.size(); ++i) {
    const Op& op = (*last.list)[i];
    if (!op.is_marked || op.unit != unit) continue;
    wait(Phase::forward, op.lane, [&] { last.ops[i].wait_in(parts_.trainer.context()); });
  }
}

void Scheduler::finish() {
  parts_.failure.check();
  require(uses_.oldest() == nullptr, Code::out_of_order, [] {
    return Problem{.what = "cannot finish: a lease of a unit has not ended", .needed = "the end of all leases"};
  });
  parts_.trainer.synchronize();
  wait(Phase::step, Lane::disk, [&] {
    runs_.last().wait_on_host();
    runs_.current().wait_on_host();
    if (parts_.gpu != nullptr) parts_.gpu->finish();
  });
  parts_.counters.count_on_gpu(runs_.last());
  parts_.counters.count_on_gpu(runs_.current());
}

void Scheduler::wait_for_last_step() {
  wait(Phase::step, Lane::disk, [&] { runs_.last().wait(); });
}

void Scheduler::begin_step() {
  wait_for_last_step();
  parts_.counters.count_on_gpu(runs_.last());
  runs_.advance();
  next_ = 0;
}

}  // namespace ballast
