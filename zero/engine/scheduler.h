// Walks through a list of operations: what is issued, what the trainer uses, and the first error of any lane.
#pragma once

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>

#include "zero/engine/exchange_order.h"
#include "zero/engine/exec_context.h"
#include "zero/engine/lanes.h"
#include "zero/engine/mesh.h"
#include "zero/engine/send_ahead.h"
#include "zero/engine/step_counters.h"
#include "zero/engine/step_run.h"
#include "zero/plan/compile_input.h"
#include "zero/plan/program.h"

namespace ballast {

// Keeps the first error of any lane, and ends the step on all ranks. Any thread may call.
class FirstFailure {
 public:
  FirstFailure(const Model& model, Mesh& mesh, ExchangeTurns& exchanges)
      : model_(model), mesh_(mesh), exchanges_(exchanges) {}

  void check() const {  // throws the first error, if there is one
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
  }

  // Called only while an exception is handled; rethrows it. For the first one it adds the operation, and aborts the
  // peers' communicators, so that no rank waits for this one. Later ones follow from the first and are only rethrown.
  [[noreturn]] void fail(const Op& op) {
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

 private:
  static std::string text_of_current_exception() {
    try {
      throw;
    } catch (const std::exception& error) {
      return error.what();
    } catch (...) {
      return "an unknown error";
    }
  }

  [[noreturn]] static void rethrow_from(const Op& op, const Model& model) {
    try {
      throw;
    } catch (const Error& error) {
      const std::string unit = op.unit == none ? "" : fmt::format("unit {}, ", model.units[op.unit].name);
      Problem problem = error.problem();
      problem.where = fmt::format("{}{} of {}{}{}", unit, name(op.kind), name(op.phase),
                                  problem.where.empty() ? "" : "; ", problem.where);
      ballast::fail(error.code(), problem);
    }
  }

  const Model& model_;
  Mesh& mesh_;
  ExchangeTurns& exchanges_;
  mutable std::mutex mutex_;
  std::exception_ptr error_;
};

// The trainer's uses of units that have begun and are not over. Used by the trainer's thread. Uses are done in the order in
// which they began: an operation that waits for one may rely on those before it.
class TrainerUses {
 public:
  TrainerUses(const ExecContext& trainer, StepCounters& counters) : trainer_(trainer), counters_(counters) {}

  void begin(const Op& op, OpStatus& status) {  // the status is done when the use is
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

  void end(std::size_t number) {  // ends the use that had this next_number()
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

  void abandon() { open_.clear(); }  // operations that wait for them fail

  const Op& op(std::size_t number) const { return *open_[number - first_].op; }
  std::size_t next_number() const { return first_ + open_.size(); }
  const Op* oldest() const { return open_.empty() ? nullptr : open_.front().op; }  // null: none is open

 private:
  struct Use {
    const Op* op;
    OpStatus* status;
    Timeline::Time begin;
    std::shared_ptr<GpuSpan> on_gpu;
    offload::Promise promise{};
    bool ended = false;
  };

  const ExecContext& trainer_;
  StepCounters& counters_;
  std::deque<Use> open_;
  std::size_t first_ = 0;  // number of the oldest, counted from the first step on
};

// Finds which issued operations the trainer does not hold up any more. An operation is free of the trainer when all uses are
// over for which it waits, or for which operations wait that it waits for, or operations before it in its lane. From then on it
// needs nothing but the lanes to end. The order in which exchanges become free depends on the trainer's calls alone, and not on
// the speed of a rank: it is the same on all ranks, also of several trainings whose trainers are one thread. In that order
// exchanges take turns, so none waits for one that needs the trainer.
//
// Used by the trainer's thread.
class FreedOps {
 public:
  explicit FreedOps(ExchangeTurns& exchanges) : exchanges_(exchanges) {}

  void add(const IssuedOp& issued) {
    const Held op{&issued.status, issued.after, issued.op.lane, issued.takes_turns};
    std::size_t& held_before = held_in_lane_[static_cast<std::size_t>(op.lane)];
    if (held_before == 0 && are_free(op.after)) return free(op);
    op.status->is_free = false;
    ++held_before;
    held_.push_back(op);
  }

  void look() {  // called when a use has ended
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

 private:
  static bool are_free(const std::vector<const OpStatus*>& ops) {
    return std::ranges::all_of(ops, [](const OpStatus* op) { return op->is_free; });
  }

  struct Held {
    OpStatus* status;
    std::vector<const OpStatus*> after;
    Lane lane;
    bool takes_turns;
  };

  void free(const Held& op) {
    op.status->is_free = true;
    if (op.takes_turns) exchanges_.add(op.status);
  }

  ExchangeTurns& exchanges_;
  std::deque<Held> held_;  // listed in the order in which they were issued
  std::array<std::size_t, lane_count> held_in_lane_{};
};

// Walks through a list of operations: hands them to their lanes in order, and stops when it is the trainer's turn. Used by the
// trainer's thread. It knows neither units nor memory: `execute` does the operations.
class Scheduler {
 public:
  // All of it outlives the scheduler.
  struct Parts {
    LaneThreads& threads;
    const ExecContext& trainer;  // the trainer's place of work: the host, or its stream on a GPU
    ExchangeTurns& exchanges;
    StepCounters& counters;
    FirstFailure& failure;
    const GpuLanes* gpu = nullptr;                        // null: every lane works on the host
    std::function<void(const IssuedOp& issued)> execute;  // called on the operation's lane
    SendAhead* ahead = nullptr;                           // null: no exchange is sent ahead
  };

  explicit Scheduler(const Parts& parts)
      : parts_(parts),
        uses_(parts.trainer, parts.counters),
        runs_(parts.counters.times_gpu() ? parts.trainer.stream() : nullptr),
        freed_(parts.exchanges) {
    if (parts.counters.times_gpu()) entry_.clock.emplace(parts.trainer.stream()->gpu());
  }

  // Set the list to follow: the program's in every step, or another one in the rest of this step. Nothing may be under
  // way.
  void follow_program(const std::vector<Op>& list) { runs_.follow(list); }

  void follow_in_this_step(const std::vector<Op>& list, const OffPlanPosition& position) {
    run().follow(list);
    run().position = position;
    next_ = 0;
    issue_up_to_trainer();
  }

  void run_entry(const std::vector<Op>& list, bool with_records) {  // runs to the end of the list
    if (entry_.clock) entry_.clock->set();
    entry_.follow(list);
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (with_records || list[i].kind != OpKind::read) issue(list[i], entry_.ops[i], entry_);
    }
    entry_.wait();
    parts_.counters.count_on_gpu(entry_);
    for (std::size_t i = 0; i < list.size(); ++i) {  // records that stay in memory; used ones have been checked
      if (list[i].kind == OpKind::read) entry_.ops[i].check_record();
    }
    runs_.set_clocks();
  }

  // The position in the list.
  StepRun& run() { return runs_.current(); }
  const std::vector<Op>& list() const { return *runs_.current().list; }
  std::size_t position() const { return next_; }  // operations issued so far
  std::span<const Op> rest() const { return std::span(list()).subspan(next_); }

  bool uses_next(const Trace& chain) const {  // whether the list has these uses next
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

  bool is_at_agreement() const { return next_ < list().size() && list()[next_].kind == OpKind::agree; }

  // Issuing. An operation begins on its lane when those that it waits for are done.
  void issue_up_to_trainer() {  // stops at the trainer's next use, or at the agreement
    while (next_ < list().size() && !is_trainers_turn(list()[next_])) {
      issue_next();
    }
  }

  const Op& issue_next() {
    const Op& op = list()[next_];
    issue(op, run().ops[next_], run());
    ++next_;
    return op;
  }

  void issue_rest() {
    while (next_ < list().size()) {
      issue_next();
    }
  }

  // The trainer's uses.
  const Op& begin_use() {  // the next one in the list, when its memory is ready
    issue_up_to_trainer();
    const Op& op = list()[next_];
    for (const Wait& needed : op.after) {
      wait(op.phase, list()[needed.op].lane, [&] { awaited(needed, run()).wait_in(parts_.trainer); });
    }
    uses_.begin(op, run().ops[next_++]);
    return op;
  }

  void end_use(std::size_t use) {  // its number; issues what follows
    const Op& op = uses_.op(use);
    try {
      uses_.end(use);
      freed_.look();
      issue_up_to_trainer();
    } catch (...) {
      parts_.failure.fail(op);
    }
  }

  const TrainerUses& uses() const { return uses_; }
  void abandon_uses() { uses_.abandon(); }

  // Waiting. Each throws the first error of any lane instead of an error that follows from it.
  void wait(Phase phase, Lane lane, const std::function<void()>& wait) {  // counted as the trainer's
    try {
      parts_.counters.wait(run(), phase, lane, wait);
    } catch (...) {
      parts_.failure.check();
      throw;
    }
  }

  void wait_for(std::size_t position) {  // one operation of this step
    wait(Phase::step, list()[position].lane, [&] { run().ops[position].wait(); });
  }

  void wait_for_inputs_of_next() {  // blocks the host until the trainer may change what the next operation uses
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
  void wait_for_issued() {  // all of this step
    wait(Phase::step, Lane::reduce, [&] {
      for (std::size_t op = next_; op-- > 0;) {
        run().ops[op].wait();
      }
      if (parts_.gpu != nullptr) parts_.gpu->finish();
    });
  }

  void wait_for_parameters(std::size_t unit) {  // that the last step has changed, in the trainer's stream
    const StepRun& last = runs_.last();
    for (std::size_t i = 0; i < last.ops.size(); ++i) {
      const Op& op = (*last.list)[i];
      if (!op.is_marked || op.unit != unit) continue;
      wait(Phase::forward, op.lane, [&] { last.ops[i].wait_in(parts_.trainer); });
    }
  }

  void wait_for_last_step() {  // waits for its commit too; uses may be under way
    wait(Phase::step, Lane::disk, [&] { runs_.last().wait(); });
  }

  // Waits for all that was begun; every use must be over. Work that the trainer issued after its leases may read or write full
  // parameters that are kept. Nothing else may write or read them before that work is done.
  void finish() {
    parts_.failure.check();
    require(uses_.oldest() == nullptr, Code::out_of_order, [] {
      return Problem{.what = "cannot finish: a lease of a unit has not ended", .needed = "the end of all leases"};
    });
    parts_.trainer.finish();
    wait(Phase::step, Lane::disk, [&] {
      runs_.last().wait_on_host();
      runs_.current().wait_on_host();
      if (parts_.gpu != nullptr) parts_.gpu->finish();
    });
    parts_.counters.count_on_gpu(runs_.last());
    parts_.counters.count_on_gpu(runs_.current());
  }

  // Waits for the last step, whose operations refer to the run that the next step reuses. It is nearly always over.
  void begin_step() {
    wait_for_last_step();
    parts_.counters.count_on_gpu(runs_.last());
    runs_.advance();
    next_ = 0;
  }

  void restart_step() { next_ = 0; }

 private:
  static bool is_trainers_turn(const Op& op) { return op.kind == OpKind::use || op.kind == OpKind::agree; }

  static bool is_exchange(const Op& op) {
    return !passes_host(op) && (op.kind == OpKind::gather || op.kind == OpKind::reduce || op.kind == OpKind::collect ||
                                op.kind == OpKind::distribute);
  }

  void issue(const Op& op, OpStatus& status, StepRun& run) {
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

  const OpStatus& awaited(const Wait& wait, const StepRun& run) const {
    return wait.is_last_steps ? runs_.before(run).ops[wait.op] : run.ops[wait.op];
  }

  Parts parts_;
  TrainerUses uses_;
  StepRuns runs_;
  StepRun entry_{};
  FreedOps freed_;
  std::size_t next_ = 0;  // operation to issue
};

}  // namespace ballast
