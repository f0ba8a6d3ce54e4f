// Does what an operation says, on its lane's thread.
#pragma once

#include "zero/comm/call.h"
#include "zero/engine/agreement.h"
#include "zero/engine/corruption_check.h"
#include "zero/engine/exchange_order.h"
#include "zero/engine/first_failure.h"
#include "zero/engine/matrix_executor.h"
#include "zero/engine/record_lane.h"
#include "zero/engine/send_ahead.h"
#include "zero/engine/slots.h"
#include "zero/engine/step_counters.h"
#include "zero/engine/step_run.h"

namespace ballast {

// run() is called by the lanes' threads, several at once; each touches the memory of its operation only.
class OpExecutor {
 public:
  // All of it outlives the executor.
  struct Parts {
    const CompiledPlan& plan;
    Mesh& mesh;
    const Slots& slots;
    const LaneArithmetic& arithmetic;
    Agreement& agreement;
    StepCounters& counters;
    FirstFailure& failure;
    ExchangeTurns& exchanges;
    const RecordLane* records = nullptr;       // null: no operation reads or writes records
    CorruptionCheck* check = nullptr;          // makes the updates, if there is one
    const MatrixExecutor* matrices = nullptr;  // null: no rule needs whole matrices
    SendAhead* ahead = nullptr;                // null: no exchange is sent ahead
  };
  explicit OpExecutor(const Parts& parts) : parts_(parts) {}

  // Waits for what the operation waits for, then does it; on a GPU, issues it. An error is the engine's first failure.
  void run(const IssuedOp& issued) const;

 private:
  void issue_to_gpu(const IssuedOp& issued, const Stream& stream) const;
  void execute(const Op& op, OpStatus& status, StepRun& run) const;
  void execute_in_any_step(const Op& op, OpStatus& status, StepRun& run) const;
  void commit(const StepRun& run) const;
  void gather(const Op& op) const;
  void reduce(const Op& op, std::uint64_t step) const;
  void reduce_encoded(const Op& op, std::uint64_t step, const ExchangeViews& views) const;
  bool scatters(const Op& op) const;
  Encoding encoding_of(const Op& op) const;
  void update(const Op& op, const StepNumbers& step) const;

  Parts parts_;
};

}  // namespace ballast
