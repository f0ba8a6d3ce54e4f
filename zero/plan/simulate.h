// Predicts the time of a step on any machine. An operation begins when the trainer has come to it, its lane is free,
// and the operations that it waits for are done; on a CPU it takes turns with all others. Three steps are walked and
// the last one counts, because steps overlap.
#pragma once

#include "zero/plan/op_cost.h"

namespace ballast {

Simulation simulate(const SimulationInput& input);

}  // namespace ballast
