// Walks through a list of operations: what is issued, what the trainer uses, and the first error of any lane.
#pragma once

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

  void check() const;  // throws the first error, if there is one

  // Called only while an exception is handled; rethrows it. For the first one it adds the operation, and aborts the
  // peers' communicators, so that no rank waits for this one. Later ones follow from the first and are only rethrown.
  [[noreturn]] void fail(const Op& op);

 private:
  const Model& model_;
  Mesh& mesh_;
  ExchangeTurns& exchanges_;
  mutable std::mutex mutex_;
  std::exception_ptr error_;
};

// The trainer's place of work: the host, or its stream on a GPU.
class TrainerStream {
 public:
  TrainerStream(kernels::Backend& cpu, const GpuLanes* gpu, StreamHandle handle) : cpu_(cpu) {
    if (gpu != nullptr) stream_.emplace(Stream::wrap(handle, gpu->gpu()));
  }
  TrainerStream(TrainerStream&&) = delete;

  const Stream* stream() const { return stream_ ? &*stream_ : nullptr; }  // null on the host
  ExecContext context() const { return stream_ ? ExecContext(cpu_, *stream_) : ExecContext(cpu_); }

  // Work that the trainer issued after its leases may read or write full parameters that are kept. Nothing else may
  // write or read them before that work is done.
  void synchronize() const {
    if (stream_) stream_->synchronize();
  }

 private:
  kernels::Backend& cpu_;
  std::optional<Stream> stream_;
};

// The trainer's uses of units that have begun and are not over. Used by the trainer's thread. Uses are done in the order in
// which they began: an operation that waits for one may rely on those before it.
class TrainerUses {
 public:
  TrainerUses(const TrainerStream& trainer, StepCounters& counters) : trainer_(trainer), counters_(counters) {}

  void begin(const Op& op, OpStatus& status);  // the status is done when the use is
  void end(std::size_t number);                // ends the use that had this next_number()
  void abandon() { open_.clear(); }            // operations that wait for them fail

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

  const TrainerStream& trainer_;
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

  void add(const IssuedOp& issued);
  void look();  // called when a use has ended

 private:
  struct Held {
    OpStatus* status;
    std::vector<const OpStatus*> after;
    Lane lane;
    bool takes_turns;
  };

  void free(const Held& op);

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
