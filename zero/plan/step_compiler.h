// Emits the operations of one step, use by use, in the slots of a program.
#pragma once

#include <deque>

#include "zero/plan/matrix_updates.h"
#include "zero/plan/parameter_gathers.h"
#include "zero/plan/tile_updates.h"

namespace ballast {

class StepCompiler {
 public:
  // Operations follow `uses`; the slots are those of the program that follows `of_program`. off_plan: the uses to come
  // are unknown.
  StepCompiler(const CompileInput& input, const Uses& of_program, const Uses& uses, bool off_plan = false);
  StepCompiler(const StepCompiler&) = delete;

  void enter();  // prepares what every step expects: gathers the first units, reads kept records
  void begin_step();
  void visit(std::size_t micro_step, std::size_t position);
  void update(std::size_t unit);
  void end_step();  // one decision of all ranks, updates in the order of the next forward, and its first gathers

  const CompileContext& context() const { return context_; }
  Builder& builder() { return builder_; }
  GradientSums& gradients() { return gradients_; }
  RankWaits& waits() { return waits_; }
  RecordStream& records() { return records_; }

  bool is_updated(std::size_t unit) const { return updated_[unit]; }
  void set_updated(std::size_t unit) { updated_[unit] = true; }

  // Whether an update in the backward pass can be left to the end of the step: the gradients stay in memory until then.
  bool update_can_wait(std::size_t unit) const;

  // Whether a unit's gradients are complete after its use at `position`.
  bool completes(std::size_t micro_step, std::size_t position) const;

 private:
  void begin_update(std::size_t unit);
  void end_updates(std::size_t but);  // all that have begun, but for the last ones
  void leave(std::size_t unit);       // a unit without gradients, as it is
  void gather_kept(std::size_t unit);
  void hoist();

  Uses uses_;
  StepSlots slots_;
  Builder builder_;
  CompileContext context_;
  RankWaits waits_;
  RecordStream records_;
  ParameterGathers parameters_;
  GradientSums gradients_;
  TileUpdates updates_;
  MatrixUpdates matrix_updates_;
  std::deque<std::size_t> begun_;  // units whose updates have begun, and not ended
  std::vector<bool> updated_;      // by unit: its parameters are the next step's
  std::size_t hoisted_ = 0;        // visits of the next step
};

// Returns the order in which units are updated.
std::vector<std::size_t> update_order(const CompileInput& input, const Uses& uses);

}  // namespace ballast
