// The traffic of activations that leave the device in forward and return in backward. They are no operations of the
// engine: ActivationStore moves them (offload/activation_store.h). For the simulator they share the lanes with these.
#pragma once

#include <ballast/planner.h>

#include <span>

#include "zero/plan/program.h"

namespace ballast {

// Returns the operations of the program with copies of each unit's activations: to the host, and to a drive if `tier` is
// that, after each forward use; and back before its backward use, while the use before that runs. A forward use begins
// when the activations of the use before the last one have left, because the device holds no more than those of two.
// The result is for the simulator only.
Program with_activations(const Program& program, std::span<const UnitWork> work, Tier tier);

}  // namespace ballast
