// Predicts the time of a step on any machine. An operation begins when the trainer has come to it, its lane is free,
// and the operations that it waits for are done. On a CPU it takes turns with all others. On GPUs gathers and reductions
// take turns on the links between ranks, and products of updates with those of the model. Three steps are walked and the
// last one counts, because steps overlap.
#pragma once

#include <vector>

#include "zero/plan/op_cost.h"

namespace ballast {

Simulation simulate(const SimulationInput& input);

// When an operation runs, in seconds from the beginning of the trainer's step. If the operation takes turns with
// others, this is its last turn.
struct SimulatedOp {
  std::size_t op = 0;  // of the program
  bool of_earlier_step = false;
  double begin = 0;
  double end = 0;
};

// The operations that run during the trainer's step, in the order of issue. An operation may begin before that step or end
// after it, because steps overlap.
std::vector<SimulatedOp> timeline_of(const SimulationInput& input);

}  // namespace ballast
