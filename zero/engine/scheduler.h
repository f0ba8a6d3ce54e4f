// Walks through a list of operations: hands them to their lanes in order, and stops when it is the trainer's turn.
#pragma once

#include "zero/engine/first_failure.h"
#include "zero/engine/freed_ops.h"
#include "zero/engine/lane_threads.h"
#include "zero/engine/send_ahead.h"
#include "zero/engine/step_run.h"
#include "zero/engine/trainer_uses.h"
#include "zero/plan/trace.h"

namespace ballast {

// Used by the trainer's thread. It knows neither units nor memory: `execute` does the operations.
class Scheduler {
 public:
  // All of it outlives the scheduler.
  struct Parts {
    LaneThreads& threads;
    const TrainerStream& trainer;
    ExchangeTurns& exchanges;
    StepCounters& counters;
    FirstFailure& failure;
    const GpuLanes* gpu = nullptr;                        // null: every lane works on the host
    std::function<void(const IssuedOp& issued)> execute;  // called on the operation's lane
    SendAhead* ahead = nullptr;                           // null: no exchange is sent ahead
  };
  explicit Scheduler(const Parts& parts);

  // Set the list to follow: the program's in every step, or another one in the rest of this step. Nothing may be under
  // way.
  void follow_program(const std::vector<Op>& list);
  void follow_in_this_step(const std::vector<Op>& list, const OffPlanPosition& position);
  void run_entry(const std::vector<Op>& list, bool with_records);  // runs to the end of the list

  // The position in the list.
  StepRun& run() { return runs_.current(); }
  const std::vector<Op>& list() const { return *runs_.current().list; }
  std::size_t position() const { return next_; }  // operations issued so far
  std::span<const Op> rest() const { return std::span(list()).subspan(next_); }
  bool uses_next(const Trace& chain) const;  // whether the list has these uses next
  bool is_at_agreement() const { return next_ < list().size() && list()[next_].kind == OpKind::agree; }

  // Issuing. An operation begins on its lane when those that it waits for are done.
  void issue_up_to_trainer();  // stops at the trainer's next use, or at the agreement
  const Op& issue_next();
  void issue_rest();

  // The trainer's uses.
  const Op& begin_use();          // the next one in the list, when its memory is ready
  void end_use(std::size_t use);  // its number; issues what follows
  const TrainerUses& uses() const { return uses_; }
  void abandon_uses() { uses_.abandon(); }

  // Waiting. Each throws the first error of any lane instead of an error that follows from it.
  void wait(Phase phase, Lane lane, const std::function<void()>& wait);  // counted as the trainer's
  void wait_for(std::size_t position);                                   // one operation of this step
  void wait_for_inputs_of_next();  // blocks the host until the trainer may change what the next operation uses
  void wait_for_issued();          // all of this step
  void wait_for_parameters(std::size_t unit);  // that the last step has changed, in the trainer's stream
  void wait_for_last_step();                   // waits for its commit too; uses may be under way
  void finish();                               // all that was begun; every use must be over
  // Waits for the last step, whose operations refer to the run that the next step reuses. It is nearly always over.
  void begin_step();
  void restart_step() { next_ = 0; }

 private:
  void issue(const Op& op, OpStatus& status, StepRun& run);
  const OpStatus& awaited(const Wait& wait, const StepRun& run) const;

  Parts parts_;
  TrainerUses uses_;
  StepRuns runs_;
  StepRun entry_{};
  FreedOps freed_;
  std::size_t next_ = 0;  // operation to issue
};

}  // namespace ballast
