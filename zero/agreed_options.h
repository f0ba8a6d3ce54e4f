// What all ranks of a training have to have in common.
#pragma once

#include <ballast/log.h>
#include <ballast/training.h>

#include <vector>

namespace ballast {

// Returns the options as all ranks have them: others would lead to wrong values, or to ranks that wait for each other. A run keeps
// the tiles that it began with, unless the caller asks for others, which it refuses.
TrainingOptions agreed_options(TrainingOptions options, const std::vector<optim::Rule>& groups, const Model& model,
                               Communicator& world, Log& warnings);

}  // namespace ballast
