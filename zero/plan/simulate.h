// Costs a program on any machine: an operation begins when the trainer has come to it, its lane is free, and what it waits
// for is done; on a CPU it takes turns with all others. Three rounds are walked, and the last one counts, for steps overlap.
#pragma once

#include <array>

#include "zero/plan/op_cost.h"

namespace ballast {

inline constexpr std::size_t phase_count = 3;

// Seconds of a step, from one end of the trainer's step to the next.
struct Simulation {
  double seconds = 0;
  std::array<double, phase_count> exposed{};    // by phase: how long the trainer waited
  std::array<double, lane_count> busy{};        // by lane
  std::array<double, lane_count> critical{};    // by lane: what the step's length is made of
  std::array<std::size_t, lane_count> bytes{};  // by lane: moved, or gone through
};

Simulation simulate(const SimulationInput& input);

}  // namespace ballast
