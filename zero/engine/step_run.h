// The state of one walk through a list of operations: how far each has come, and what was decided.
#pragma once

#include <ballast/error.h>
#include <ballast/records.h>
#include <ballast/step.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/orthogonalize.h"
#include "kernels/update.h"
#include "offload/completion.h"
#include "offload/record_store.h"
#include "zero/engine/exec_context.h"
#include "zero/plan/layout.h"
#include "zero/plan/program.h"

namespace ballast {

// A rank's next use off plan: the number of its uses in this step so far, the unit + 1 (0: the step), and the phase.
using OffPlanPosition = std::array<std::int64_t, 3>;

inline OffPlanPosition off_plan_position(std::size_t uses, std::size_t unit, Phase phase) {  // unit `none`: the step
  return {static_cast<std::int64_t>(uses), static_cast<std::int64_t>(unit + 1), static_cast<std::int64_t>(phase)};
}

// The numbers of a step that its updates use. Written by the agreement, before the updates that wait for it read it.
struct StepNumbers {
  std::uint64_t number = 0;  // updates made, this one included
  bool skip = false;
  float gradient_factor = 1.0f;
  std::vector<kernels::GroupStep> groups{};  // one for each parameter group, and for tensors that have missed steps
  // Says for each unit and tensor which of `groups` updates it; none: it stays as it is. If empty, its parameter group
  // does.
  std::vector<std::vector<std::size_t>> group_of{};
  // A rule of whole matrices has these: how each group's are orthogonalized, and the update with the result, by
  // MatrixGroups.
  std::vector<kernels::NewtonSchulz> orthogonalizations{};
  std::vector<kernels::GroupStep> matrices{};

  std::span<const std::size_t> groups_of(std::size_t unit) const {
    return group_of.empty() ? std::span<const std::size_t>() : group_of[unit];
  }

  bool leaves_out(std::size_t unit, std::size_t tensor) const {
    return !group_of.empty() && group_of[unit][tensor] == none;
  }

  void leave_out(std::size_t unit, std::size_t tensor) { group_of[unit][tensor] = none; }
};

// What the updates before a step's agreement take for granted: that the step is not skipped, its rules and missed steps, and the
// factor of its gradients if they are not clipped.
struct ExpectedStep {
  std::string rules{};  // the options of the rules
  std::vector<std::uint64_t> missed{};
  float gradient_factor = 1.0f;

  bool operator==(const ExpectedStep&) const = default;
};

// The progress of an operation.
// The operation's lane writes the members after `is_free` before `begun` is done. Other threads read them after that.
struct OpStatus {
  offload::Completion begun{};  // the end on the CPU; requests to a drive, and work in a stream, end later
  bool is_awaited = false;  // an operation of the list waits for it; otherwise its end in a stream need not be marked
  bool is_free = true;      // free of the trainer: see FreedOps; the trainer's thread alone uses it
  bool in_stream = false;
  std::optional<offload::PendingRead> read{};
  mutable bool is_checked = false;  // the record that is read
  offload::Completion written{};
  std::shared_ptr<GpuSpan> on_gpu{};  // null: its end is not marked

  bool has_succeeded() const {  // says so of the work on the host; false before the end, and after a failure
    if (!begun.is_done() || (read && !read->completion().is_done()) || !written.is_done()) return false;
    try {
      wait_on_host();  // it has ended
    } catch (...) {
      return false;
    }
    return true;
  }

  void wait() const {  // blocks the calling thread until the end, if that is marked
    begun.wait();
    if (on_gpu) on_gpu->end.synchronize();
    wait_on_host();
  }

  void wait_on_host() const {  // also returns before the end of work in a stream
    begun.wait();
    if (read) read->completion().wait();
    written.wait();
  }

  // Waits until the operation has read its record, if it reads one. The first call also verifies the record's checksum, and
  // throws B3202.
  // A rule of whole matrices changes the record between its two updates.
  void check_record() const {
    std::atomic_ref<bool> checked(is_checked);
    if (!read || checked) return;
    read->check();
    checked = true;
  }

  // The same, by the trainer, before the operations that use the record are issued: it is about to change the record, so those
  // do not check it again.
  void accept_record() {
    check_record();
    read.reset();
  }

  // No stream ever waits for a drive: the thread does.
  void wait_in(const ExecContext& context) const {  // later work there begins after the end
    begun.wait();
    require(on_gpu || !in_stream, Code::internal,
            [] { return Problem{.what = "cannot wait for an operation: its end in a stream is not marked"}; });
    if (context.stream() == nullptr || !on_gpu) return wait();
    context.stream()->wait_for(on_gpu->end);
  }
};

// A wait of the trainer's stream, between two events in it.
struct StreamWait {
  Phase phase;
  Lane lane;
  GpuSpan span;
};

// The scheduler owns it. The trainer's thread writes all of it, with two exceptions: the lane of an operation writes
// its status, and the operation `agree` writes `numbers` and `result`, before the operations that wait for it read
// them.
struct StepRun {
  const std::vector<Op>* list = nullptr;
  std::vector<OpStatus> ops{};
  std::uint64_t step = 0;  // updates made before it, plus 1; seeds the random bits of sums
  StepNumbers numbers{};
  std::optional<ExpectedStep> expected{};
  bool is_early = false;  // units are updated before the agreement, with `numbers`; it leaves its own in `decided`
  StepNumbers decided{};  // likewise written by the agreement
  bool is_as_expected = false;    // likewise
  std::vector<std::byte> note{};  // bytes of the trainer that the commit keeps
  JointRound round{};             // likewise
  StepResult result{};
  std::optional<GpuClock> clock{};  // set when the run began; for a timeline only
  std::deque<StreamWait> waits{};   // not counted yet
  OffPlanPosition position{};       // the position of a list that is not the program's

  void follow(const std::vector<Op>& operations) {  // begins the list, which outlives it
    list = &operations;
    ops = std::vector<OpStatus>(operations.size());
    const std::vector<bool> awaited = awaited_in(operations);
    for (std::size_t op = 0; op < ops.size(); ++op) {
      ops[op].is_awaited = awaited[op];
    }
  }

  // Waits from the end, so that the calling thread is woken once for each lane, not once for each operation.
  void wait() const {  // returns when the whole list is done, if all of it was issued
    for (std::size_t op = ops.size(); op-- > 0;) {
      ops[op].wait();
    }
  }

  void wait_on_host() const {  // the same, but for work in streams
    for (std::size_t op = ops.size(); op-- > 0;) {
      ops[op].wait_on_host();
    }
  }
};

// The runs of three steps: of this one, of the last one, which may still be under way, and of the one before. That one
// is over, but operations of the last one refer to it as long as they run.
class StepRuns {
 public:
  explicit StepRuns(const Stream* timed) {  // the trainer's stream, if work there is timed
    for (StepRun& run : runs_) {
      if (timed != nullptr) run.clock.emplace(timed->gpu());
    }
  }

  StepRun& current() { return runs_[step_ % runs_.size()]; }
  const StepRun& current() const { return runs_[step_ % runs_.size()]; }
  StepRun& last() { return runs_[(step_ + runs_.size() - 1) % runs_.size()]; }

  const StepRun& before(const StepRun& run) const {  // takes one of those three
    const auto number = static_cast<std::size_t>(&run - runs_.data());
    return runs_[(number + runs_.size() - 1) % runs_.size()];
  }

  void advance() {  // begins the next step; what it reuses must be over
    ++step_;
    if (current().clock) current().clock->set();
  }

  void follow(const std::vector<Op>& operations) {  // changes all runs, while none is under way
    for (StepRun& run : runs_) {
      run.follow(operations);
    }
  }

  void set_clocks() {
    for (StepRun& run : runs_) {
      if (run.clock) run.clock->set();
    }
  }

 private:
  std::array<StepRun, 3> runs_;
  std::size_t step_ = 0;
};

// An operation on its way to its lane.
struct IssuedOp {
  const Op& op;
  OpStatus& status;
  StepRun& run;
  std::vector<const OpStatus*> after{};  // begins when these are done
  bool takes_turns = false;              // takes turns with other exchanges between GPUs
};

}  // namespace ballast
