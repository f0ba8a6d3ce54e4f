// Spreads parameters, gradients and state over all tiers.
#pragma once

#include <ballast/planner.h>

namespace ballast {

// The placement that uses most of the device, then most of the host, and leaves the rest of the state to the drives; it may
// not fit all the same. None if there is no second tier, or if the stage is to be below 3.
std::optional<Placement> fill_tiers(const ChoiceInput& input);

}  // namespace ballast
