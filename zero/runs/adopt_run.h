// Finds a run on the drives of all ranks, and adopts it where it was left by other ranks, or by another stage, format or tiles.
#pragma once

#include <ballast/comm.h>

#include <functional>
#include <optional>
#include <span>

#include "zero/runs/inventory.h"

namespace ballast {

// The records that a rank opens. Its directories hold these or none, and their description is that of the training.
struct SettledRun {
  RecordFiles files{};
  bool are_there = false;
  std::optional<WholeRun> run{};  // at the commit from which it resumes, whose records are all there; none: it begins
  std::uint64_t run_id = 0;       // 0: it begins
  std::uint64_t incarnation = 1;  // of this start
  bool goes_back = false;         // the newest commit of the files is damaged, and does not count
  std::optional<LostRun> lost{};  // the run that was lost, if RecordOptions::begins_again
  // Removes all other records of the run that this rank sees, except those that belong to the same training: of other ranks, and
  // mirrors of the ranks `mirrored`. All ranks call it together, once these are mirrored if they will be, and before a step:
  // from then on the others would be another history.
  std::function<void(std::span<const std::size_t> mirrored)> remove_others{};
};

// Finds them, after all ranks have agreed.
//
// Other records of the run become those of this training at their newest common step. They are written to new files, and the
// old ones are removed when all new ones are committed: a crash at any moment leaves the old ones or the new ones whole. Both
// are on the drives at once.
//
// All ranks call it together, while each holds the lock of its own directories. Throws the same on all ranks, and changes
// nothing then: B1009 if the parameters or the rule differ, or if records are missing; B2202 without space for both.
SettledRun settle_run(const OwnRun& own, Communicator& world);

}  // namespace ballast
