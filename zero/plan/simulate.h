// Predicts the time of a step on any machine. An operation begins when the trainer has come to it, its lane is free,
// and the operations that it waits for are done; on a CPU it takes turns with all others. Three steps are walked and
// the last one counts, because steps overlap.
#pragma once

#include <array>

#include "zero/plan/op_cost.h"

namespace ballast {

inline constexpr std::size_t phase_count = 3;

// Seconds of a step, from one end of the trainer's step to the next.
struct Simulation {
  double seconds = 0;
  std::array<double, phase_count> exposed{};    // by phase: time that the trainer waited
  std::array<double, lane_count> busy{};        // by lane
  std::array<double, lane_count> critical{};    // by lane: its part of the critical path
  std::array<std::size_t, lane_count> bytes{};  // by lane: moved, or gone through
};

Simulation simulate(const SimulationInput& input);

}  // namespace ballast
