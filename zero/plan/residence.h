// The tier of each unit and each tile in a placement.
#pragma once

#include <ballast/placement.h>

#include <vector>

#include "zero/plan/layout.h"

namespace ballast {

// The tiers of one unit and its tiles. Parameters are no farther than the state that makes them, and gradients wait
// where the update is made, or nearer. The fractions of a placement yield to this.
struct UnitResidence {
  Tier parameters = Tier::device;
  Tier gradients = Tier::device;
  std::vector<Tier> state{};  // by tile
};

std::vector<UnitResidence> reside(const Placement& placement, const Layout& layout);

}  // namespace ballast
