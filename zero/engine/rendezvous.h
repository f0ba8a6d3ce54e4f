// The point at which all ranks make sure that they have left the program's order in the same way.
#pragma once

#include <array>
#include <cstdint>

#include "zero/engine/mesh.h"
#include "zero/plan/program.h"

namespace ballast {

// A rank's next use off plan: the number of its uses in this step so far, the unit + 1 (0: the step), and the phase.
using OffPlanPosition = std::array<std::int64_t, 3>;

OffPlanPosition off_plan_position(std::size_t uses, std::size_t unit, Phase phase);  // unit `none`: the step

// A collective of the operation's ranks, on the lane of `op`. Throws B1007 if positions differ, or if this rank is the
// only one off plan: ranks that use units in different orders would mix up the units' memory.
void rendezvous(const Op& op, const OffPlanPosition& position, Mesh& mesh, const Model& model);

}  // namespace ballast
