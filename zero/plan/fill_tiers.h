// Spreads parameters, gradients and state over all tiers.
#pragma once

#include <ballast/planner.h>

namespace ballast {

// The placement that uses most of the device, then most of the host, and leaves the rest of the state to the drives; it may
// not fit all the same. None if there is no second tier, or if the stage is to be below 3.
std::optional<Placement> fill_tiers(const ChoiceInput& input);

// The placement with the parameters of one unit more on the device, and all state in the farthest tier. As units are large, a
// part of the device is free that holds a part of that unit's state.
Placement with_one_more_unit(const ChoiceInput& input, const Placement& filled);

}  // namespace ballast
