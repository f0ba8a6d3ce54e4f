// Does what an operation says, on its lane's thread.
#pragma once

#include <memory>
#include <vector>

#include "kernels/orthogonalize.h"
#include "zero/comm/call.h"
#include "zero/engine/agreement.h"
#include "zero/engine/corruption_check.h"
#include "zero/engine/exchange_order.h"
#include "zero/engine/lanes.h"
#include "zero/engine/mesh.h"
#include "zero/engine/record_lane.h"
#include "zero/engine/scheduler.h"
#include "zero/engine/send_ahead.h"
#include "zero/engine/slots.h"
#include "zero/engine/step_counters.h"
#include "zero/engine/step_run.h"
#include "zero/plan/compile.h"

namespace ballast {

// A collective of the operation's ranks, on the lane of `op`, by which all ranks make sure that they have left the program's
// order in the same way. Throws B1007 if positions differ, or if this rank is the only one off plan: ranks that use units in
// different orders would mix up the units' memory.
void rendezvous(const Op& op, const OffPlanPosition& position, Mesh& mesh, const Model& model);

// Brings the matrices of a unit to their homes, orthogonalizes them there, and brings them back. Each operation is called by
// its lane's thread. On a GPU the work is issued into the lane's stream.
class MatrixExecutor {
 public:
  // All of it outlives the executor. Without a GPU, `threads` of the CPU multiply.
  MatrixExecutor(const CompiledPlan& plan, Mesh& mesh, const Slots& slots, const GpuLanes* gpu, int threads);

  void collect(const Op& op) const;
  void distribute(const Op& op) const;
  void orthogonalize(const Op& op, const StepNumbers& step) const;

 private:
  template <class Part>
  std::vector<Part> parts(const std::vector<MatrixPart>& of, const Piece& piece) const;
  View values(const Piece& piece, std::size_t begin, std::size_t count) const;

  const CompiledPlan& plan_;
  Mesh& mesh_;
  const Slots& slots_;
  std::vector<std::size_t> rank_of_shard_;  // each shard's rank in the group
  std::vector<UnitMatrices> homes_;         // one for each unit
  std::vector<MatrixParts> parts_;          // one for each unit
  std::unique_ptr<kernels::Orthogonalizer> orthogonalizer_;
};

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
