// Off-plan steps, in which the trainer leaves the program's order. They are served on demand, list by list. An order
// that comes twice in a row is compiled.
#pragma once

#include "zero/engine/scheduler.h"
#include "zero/engine/slots.h"

namespace ballast {

// Used by the trainer's thread; all ranks go off plan in the same way, which rendezvous() checks.
class OffPlan {
 public:
  // All of it outlives this.
  struct Parts {
    RunningProgram& running;
    Slots& slots;
    Scheduler& scheduler;
    StepCounters& counters;
  };
  explicit OffPlan(const Parts& parts) : parts_(parts) {}
  OffPlan(OffPlan&&) = delete;

  void serve(const Trace& chain);  // makes these uses the next ones in the scheduler's list
  void serve_step();               // makes the agreement the next one
  void forget_gathered();          // further uses of the step gather changed parameters again
  void restart_step();             // discards the uses so far, and follows the program from its beginning
  void keep_gathered(std::size_t bytes, const AgreeOnMemory& agree);  // between steps: see Training

  void remember(const Trace& chain);                 // uses that have begun
  const Trace& visited() const { return visited_; }  // the visits of this step
  bool has_gradients() const;                        // whether there are some that no step has used yet
  void end_step();                                   // returns to a program, if this step was off plan

 private:
  void forget_step();
  void go_off_plan(const Visit& next);
  void follow(std::vector<Op> ops, const Visit& next);
  bool needs_second_sum(const Trace& chain) const;
  void end_off_plan_step();
  Trace repeated_order() const;
  bool change_program(const Trace& trace, bool extra_sum_slots);

  Parts parts_;
  Trace visited_{};       // the visits of this step
  OffPlanStep so_far_{};  // the same, without off-plan uses in forward
  bool is_off_plan_ = false;
  std::vector<Op> served_{};  // the list that is followed then
  Trace last_off_plan_{};     // the visits of the step before, if that was off plan
};

}  // namespace ballast
