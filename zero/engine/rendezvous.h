// The point at which all ranks make sure that they have left the program's order in the same way.
#pragma once

#include <array>
#include <cstdint>

#include "zero/engine/mesh.h"
#include "zero/plan/program.h"

namespace ballast {

// What a rank is about to do off plan: its uses in this step so far, then unit + 1 (0: the step) and phase of the next.
using OffPlanPosition = std::array<std::int64_t, 3>;

OffPlanPosition off_plan_position(std::size_t uses, std::size_t unit, Phase phase);  // unit `none`: the step

// A collective of the operation's ranks, on the lane of `op`. Throws B1007 where positions differ, or where this rank is the
// only one that has left the order: ranks that use units in different orders would mix up the units' memory.
void rendezvous(const Op& op, const OffPlanPosition& position, Mesh& mesh, const Model& model);

}  // namespace ballast
