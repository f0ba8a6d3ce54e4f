// How full tiers are with a placement, and the placements that spread parameters, gradients and state over all tiers.
#pragma once

#include <ballast/planner.h>

#include <functional>

namespace ballast {

// Returns how full the fullest tier is, from one tier on to those before another: 1 if its budget is just used.
double fullness(const ChoiceInput& input, const Placement& placement, Tier first, Tier end);

// Returns the greatest part, from 0 to 1, with which memory is at most full; 0 if even that is too much. `fullness_with`
// returns the fullness with a part. It grows with the part and nearly in proportion, so a few interpolations come within a
// hundredth of full memory. Where it grows in steps, the part is known to the finest one.
double greatest_part(double finest, const std::function<double(double)>& fullness_with);

// Rounds a fraction down to the four digits with which a plan is printed, so the printed one fits, too.
double round_fraction(double fraction);

// The placement that uses most of the device, then most of the host, and leaves the rest of the state to the drives; it may
// not fit all the same. None if there is no second tier, or if the stage is to be below 3.
std::optional<Placement> fill_tiers(const ChoiceInput& input);

// The placement with the parameters of one unit more on the device, and all state in the farthest tier. As units are large, a
// part of the device is free that holds a part of that unit's state.
Placement with_one_more_unit(const ChoiceInput& input, const Placement& filled);

}  // namespace ballast
