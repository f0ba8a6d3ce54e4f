#include "zero/engine/scheduler.h"

#include <ballast/error.h>

namespace ballast {
namespace {

bool is_exchange(const Op& op) {
  return op.kind == OpKind::gather || op.kind == OpKind::reduce || op.kind == OpKind::collect ||
         op.kind == OpKind::distribute;
}

bool is_trainers_turn(const Op& op) { return op.kind == OpKind::use || op.kind == OpKind::agree; }

}  // namespace

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
  return wait.of_last_step ? runs_.before(run).ops[wait.op] : run.ops[wait.op];
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
      if (!needed.of_last_step) run().ops[needed.op].accept_record();
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
