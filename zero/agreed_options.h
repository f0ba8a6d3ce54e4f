// What all ranks of a training have to have in common, and how those of a machine divide its cores.
#pragma once

#include <ballast/log.h>
#include <ballast/training.h>

#include <vector>

namespace ballast {

// Returns the options as all ranks have them: others would lead to wrong values, or to ranks that wait for each other. A run keeps
// the tiles that it began with, unless the caller asks for others, which it refuses.
TrainingOptions agreed_options(TrainingOptions options, const std::vector<optim::Rule>& groups, const Model& model,
                               Communicator& world, Log& warnings);

// Returns the CPU threads of this rank where the options name none: the cores that it may use, near its GPU if it has one, divided
// among the ranks of its machine that may use the same ones. One of them is left to the thread that launches a GPU's kernels. All
// ranks call it together.
int threads_of_rank(Communicator& world, const TrainingOptions& options);

}  // namespace ballast
