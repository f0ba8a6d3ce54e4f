// Updates that the trainer makes itself, after a step's decision and before the operations that follow from it.
#pragma once

#include "zero/engine/agreement.h"
#include "zero/engine/scheduler.h"

namespace ballast {

// Used by the trainer's thread.
class CustomUpdate {
 public:
  // All of it outlives this.
  struct Parts {
    const CompiledPlan& plan;
    const Slots& slots;
    Scheduler& scheduler;
    FirstFailure& failure;
    bool is_checked = false;  // updates are made twice, by a CorruptionCheck
  };
  explicit CustomUpdate(const Parts& parts) : parts_(parts) {}

  // Throws unless all masters are in memory at once, in fp32, when the norm is known.
  void require_possible() const;

  // Called at the agreement: issues it, and calls `update` unless the step is skipped. The list's updates, which come
  // next, make the parameters from the masters.
  void run(const TrainerUpdate& update) const;

 private:
  std::vector<SummedTile> summed_tiles() const;
  SummedTile summed_tile(const Op& update, const Piece& gradients) const;

  Parts parts_;
};

}  // namespace ballast
