// Updates that the trainer makes itself, after a step's decision and before the operations that follow from it.
#pragma once

#include "zero/engine/scheduler.h"
#include "zero/engine/slots.h"

namespace ballast {

// Throws unless all masters are in fp32, and are updated when the norm is known. is_checked: by a CorruptionCheck.
void require_custom_update(const CompiledPlan& plan, bool is_checked);

// Called at the agreement, by the trainer's thread: issues it, and calls `update` unless the step is skipped: once for all tiles
// in memory, and then for each other tile, when the list has brought it there. The list's updates make the parameters from the
// masters. Issues the list up to the last of those tiles.
void update_by_trainer(const CompiledPlan& plan, const Slots& slots, Scheduler& scheduler, FirstFailure& failure,
                       const TrainerUpdate& update);

}  // namespace ballast
