// Off-plan steps, in which the trainer leaves the program's order. They are served on demand, list by list. An order
// that comes twice in a row is compiled.
#pragma once

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "zero/engine/scheduler.h"
#include "zero/engine/slots.h"

namespace ballast {

// The share of steps whose early updates are not those of the step, in about the last 16. It decides on the order of updates.
class RepeatShare {
 public:
  explicit RepeatShare(double most) : most_(most) {}

  bool add(bool repeats) {  // returns whether units are updated early in the next step
    constexpr double window = 16;
    steps_ = std::min(steps_ + 1, window);
    share_ += ((repeats ? 1.0 : 0.0) - share_) / steps_;
    is_early_ = share_ <= (is_early_ ? most_ : most_ / 2);
    return is_early_;
  }

 private:
  double most_;
  double steps_ = 0;
  double share_ = 0;
  bool is_early_ = true;
};

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

  void serve(const Trace& chain) {  // makes these uses the next ones in the scheduler's list
    go_off_plan(chain.back());
    if (needs_second_sum(chain)) {
      change_program(parts_.running.input().trace, true);
      follow({}, chain.back());  // the rest of the old program is gone
      so_far_.gathered.clear();
    }
    follow(compile_visits(parts_.running.input(), so_far_, chain), chain.back());
  }

  // Makes the agreement the next one.
  void serve_step() {
    go_off_plan({none, Phase::step});
    follow(compile_step(parts_.running.input(), so_far_), {none, Phase::step});
  }

  // Lets further uses of the step gather changed parameters again.
  // The rest of the program would use what it has gathered before the change. What is done on demand uses nothing from before.
  void forget_gathered() {
    so_far_.gathered.clear();
    const std::vector<Slot>& slots = parts_.running.program().slots;
    const bool gathers = std::ranges::find(slots, SlotRole::gathered, &Slot::role) != slots.end();
    if (visited_.empty() || !gathers) return;
    if (!has_gradients()) return restart_step();
    if (is_off_plan_) return;
    go_off_plan({none, Phase::step});
    follow({}, {none, Phase::step});
  }

  // Discards the uses so far, and follows the program from its beginning.
  void restart_step() {
    forget_step();
    parts_.scheduler.restart_step();
    parts_.scheduler.follow_program(parts_.running.program().ops);
  }

  // Called between steps: see Training.
  // What the old program has gathered for the next step is gathered again.
  void keep_gathered(std::size_t bytes, const AgreeOnMemory& agree) {
    parts_.scheduler.finish();
    auto changed = parts_.running.compile_with(bytes);
    if (changed->slots == parts_.running.program().slots) return;
    parts_.slots.change_to(*changed, agree);
    const CompileInput& input = parts_.running.input();
    parts_.running.change_to(std::move(changed), input.trace, input.extra_sum_slots);
    restart_step();
    parts_.scheduler.run_entry(parts_.running.program().entry, true);
  }

  // Makes the updates of this step, whose agreement is over, again: with the options of the step. Or makes none if it is skipped.
  void repeat_updates() {
    StepRun& run = parts_.scheduler.run();
    parts_.scheduler.finish();
    run.numbers = std::move(run.decided);
    replace_updates(run.numbers.skip ? compile_undo : compile_repeat);
    return_to_program(false);
  }

  // Brings back what updates of this step have changed already, before the state is read or changed. The rest of the step is
  // served on demand.
  void undo_updates() {
    if (!has_early_updates()) return;
    go_off_plan({none, Phase::step});
    follow({}, {none, Phase::step});
  }

  // Between steps: lets the next ones update units early, or after the norm.
  void update_early(bool early) {
    if (early == parts_.running.input().updates_early()) return;
    parts_.scheduler.finish();
    parts_.running.update_early(early);
    restart_step();
    parts_.scheduler.run_entry(parts_.running.program().entry, true);
  }

  // Long evaluations are off plan too, so uses in forward are left out: they are over when the next list begins, and need
  // not be compiled again.
  void remember(const Trace& chain) {  // uses that have begun
    visited_.insert(visited_.end(), chain.begin(), chain.end());
    const bool counts = !is_off_plan_ || chain.back().phase == Phase::backward;
    if (counts) so_far_.visits.insert(so_far_.visits.end(), chain.begin(), chain.end());
  }

  const Trace& visited() const { return visited_; }  // the visits of this step
  bool is_off_plan() const { return is_off_plan_; }
  bool is_repeated() const { return is_repeated_; }

  bool has_gradients() const {  // whether there are some that no step has used yet
    return std::ranges::any_of(visited_, [](const Visit& visit) { return visit.phase == Phase::backward; });
  }

  // Returns to a program, if this step was off plan.
  void end_step() {
    is_off_plan_ ? end_off_plan_step() : last_off_plan_.clear();
    forget_step();
  }

 private:
  void forget_step() {
    is_off_plan_ = is_repeated_ = false;
    so_far_ = {};
    visited_.clear();
  }

  // Each list begins when everything before it is over, because it may use any memory. So every lease has to end first.
  void go_off_plan(const Visit& next) {
    const Op* const open = parts_.scheduler.uses().oldest();
    require(open == nullptr, Code::out_of_order, [&] {
      const std::vector<Unit>& units = parts_.running.plan().model().units;
      const std::span<const Op> rest = parts_.scheduler.rest();
      const bool has_next = !is_off_plan_ && !rest.empty() && rest.front().kind == OpKind::use;
      const std::string end = fmt::format("the end of the lease of unit {}", units[open->unit].name);
      return Problem{.what = fmt::format("cannot use unit {} in {} out of order: a lease of unit {} has not ended",
                                         units[next.unit].name, name(next.phase), units[open->unit].name),
                     .needed = has_next ? fmt::format("unit {} in {}, or {}", units[rest.front().unit].name,
                                                      name(rest.front().phase), end)
                                        : end};
    });
    parts_.scheduler.finish();
    if (is_off_plan_) return;
    so_far_.by_program = so_far_.visits.size();
    if (has_early_updates()) replace_updates(compile_undo);
    StepRun& run = parts_.scheduler.run();
    run.is_early = false;
    run.expected.reset();
  }

  bool has_early_updates() const {
    Scheduler& scheduler = parts_.scheduler;
    const std::span<const Op> issued(scheduler.list().data(), scheduler.position());
    return scheduler.run().is_early && std::ranges::find(issued, OpKind::update, &Op::kind) != issued.end();
  }

  // Does a list in which the trainer has no use, from its beginning to its end.
  void replace_updates(std::vector<Op> (&list_for)(const CompileInput& input)) {
    const auto begin = std::chrono::steady_clock::now();
    served_ = list_for(parts_.running.input());
    parts_.scheduler.follow_in_this_step(served_, {});
    parts_.scheduler.finish();
    parts_.counters.count_repeat(std::chrono::steady_clock::now() - begin);
    is_repeated_ = true;
  }

  void follow(std::vector<Op> ops, const Visit& next) {
    is_off_plan_ = true;
    served_ = std::move(ops);
    parts_.scheduler.follow_in_this_step(served_, off_plan_position(visited_.size(), next.unit, next.phase));
  }

  // Whether a unit gets gradients again, and the program's slots have room for only one sum of them.
  bool needs_second_sum(const Trace& chain) const {
    const CompileInput& input = parts_.running.input();
    if (input.extra_sum_slots || input.schedule.update_in_backward || input.placement.reduction != Reduction::each) {
      return false;
    }
    return std::ranges::any_of(chain, [&](const Visit& visit) {
      return visit.phase == Phase::backward && std::ranges::any_of(so_far_.visits, [&](const Visit& before) {
               return before.unit == visit.unit && before.phase == Phase::backward;
             });
    });
  }

  // Finishes the off-plan step, and then prepares memory as every step of a program expects it.
  void end_off_plan_step() {
    Scheduler& scheduler = parts_.scheduler;
    scheduler.finish();
    parts_.counters.count_off_plan_step();
    is_off_plan_ = false;
    const Trace repeated = repeated_order();
    const bool is_new = !repeated.empty() && repeated != parts_.running.input().trace;
    const bool changed = is_new && change_program(repeated, parts_.running.input().extra_sum_slots);
    last_off_plan_ = visited_;
    return_to_program(changed);
  }

  void return_to_program(bool changed) {
    Scheduler& scheduler = parts_.scheduler;
    const Program& program = parts_.running.program();
    scheduler.follow_program(program.ops);
    scheduler.wait(Phase::step, Lane::gather, [&] { scheduler.run_entry(program.entry, changed); });
  }

  // The order of each micro-step of this step, if the last step was off plan and had the same; else empty.
  Trace repeated_order() const {
    const Trace& visits = visited_;
    const std::size_t length = visits.size() / parts_.running.input().micro_steps;
    if (visits != last_off_plan_ || visits.size() % parts_.running.input().micro_steps != 0) return {};
    for (std::size_t i = length; i < visits.size(); ++i) {
      if (!(visits[i] == visits[i - length])) return {};
    }
    return {visits.begin(), visits.begin() + static_cast<std::ptrdiff_t>(length)};
  }

  // Keeps the same slots; with `extra_sum_slots` there are more. Refuses a program that lacks slots in which gradients
  // wait for the step now: another off-plan step could not be served.
  bool change_program(const Trace& trace, bool extra_sum_slots) {
    auto changed = parts_.running.compile_for(trace, extra_sum_slots);
    const bool loses_sums = std::ranges::any_of(parts_.running.program().slots, [&](const Slot& slot) {
      return slot.role == SlotRole::reduced && std::ranges::find(changed->slots, slot) == changed->slots.end();
    });
    if (loses_sums) return false;
    parts_.slots.change_to(*changed);
    parts_.running.change_to(std::move(changed), trace, extra_sum_slots);
    parts_.scheduler.follow_program(parts_.running.program().ops);
    return true;
  }

  Parts parts_;
  Trace visited_{};       // the visits of this step
  OffPlanStep so_far_{};  // the same, without off-plan uses in forward
  bool is_off_plan_ = false;
  bool is_repeated_ = false;  // early updates of this step were made again, or undone
  std::vector<Op> served_{};  // the list that is followed then
  Trace last_off_plan_{};     // the visits of the step before, if that was off plan
};

}  // namespace ballast
