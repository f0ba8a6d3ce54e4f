// Updates that the trainer makes itself, after a step's decision and before the operations that follow from it.
#pragma once

#include <span>
#include <vector>

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

  // Throws unless all masters are in fp32, and are updated when the norm is known.
  void require_possible() const;

  // Called at the agreement: issues it, and calls `update` unless the step is skipped: once for all tiles in memory, and
  // then for each other tile, when the list has brought it there. The list's updates make the parameters from the
  // masters. Issues the list up to the last of those tiles.
  void run(const TrainerUpdate& update) const;

 private:
  // The updates in the rest of the list, by their positions in the list.
  struct Updates {
    std::vector<std::size_t> of_kept;     // tiles that memory keeps
    std::vector<std::size_t> of_passing;  // tiles that operations of the list bring to memory
  };
  Updates updates() const;
  std::vector<SummedTile> kept_tiles(std::span<const std::size_t> updates) const;
  std::vector<TilePart> parts_of(std::size_t number, const Range& in_shard) const;  // the parts of a unit
  SummedTile summed_tile(const Op& update, const Piece& gradients) const;
  const Op& op(std::size_t position) const { return parts_.scheduler.list()[position]; }

  Parts parts_;
};

}  // namespace ballast
