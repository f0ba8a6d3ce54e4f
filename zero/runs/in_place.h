// Decides whether a training finds a run where it keeps it, and whether damage there sends it back to the commit before.
#pragma once

#include <ballast/comm.h>

#include <optional>
#include <span>

#include "zero/runs/inventory.h"
#include "zero/runs/own_run.h"
#include "zero/runs/search.h"

namespace ballast {

// Whether each rank sees its own records of the run at its commit. Records that are known to be damaged count only where
// there is no other copy.
bool is_in_place(const WholeRun& run, std::span<const SeenRecords> seen, const OwnRun& own, std::size_t ranks);

// Returns a run that is in place at an earlier commit, if an earlier read of records at its own commit has failed and fails
// again. None if nothing is damaged, or if not all ranks have an earlier commit that is intact. The log says which. All ranks
// call it together.
std::optional<WholeRun> run_before_damage(const WholeRun& run, std::span<const SeenRecords> seen, const OwnRun& own,
                                          const RunSearch& search, Communicator& world);

}  // namespace ballast
