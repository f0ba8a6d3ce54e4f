// Finds a run on the drives of all ranks, and takes it over where it was left by other ranks, or by another stage, format or
// tiles.
#pragma once

#include <ballast/comm.h>

#include "zero/own_run.h"

namespace ballast {

// Returns which records this rank opens, after all ranks have agreed. Its directories then hold these or none, and no other
// rank's records are left. The description of these is that of the training.
//
// Other records of the run become those of this training at their newest common step. They are written to new files, and the
// old ones are removed when all new ones are committed: a crash at any moment leaves the old ones or the new ones whole. Both
// are on the drives at once.
//
// All ranks call it together, while each holds the lock of its own directories. Throws the same on all ranks, and changes
// nothing then: B1009 if the parameters or the rule differ, or if records are missing; B2202 without space for both.
RecordFiles settle_run(const OwnRun& own, Communicator& world);

}  // namespace ballast
