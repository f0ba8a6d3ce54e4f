// Costs a program on any machine: an operation begins when the trainer has come to it, its lane is free, and what it waits
// for is done; on a CPU it takes turns with all others. Three rounds are walked, and the last one counts, for steps overlap.
#pragma once

#include <array>
#include <span>

#include "zero/plan/machine.h"
#include "zero/plan/program.h"

namespace ballast {

inline constexpr std::size_t phase_count = 3;

struct SimulationInput {
  const Program& program;
  Placement placement;
  Machine machine;
  std::span<const UnitWork> work;  // by unit
  bool waits_for_updates = false;  // the trainer begins no step before the last one's updates are done
};

// Seconds of a step, from one end of the trainer's step to the next.
struct Simulation {
  double seconds = 0;
  std::array<double, phase_count> exposed{};    // by phase: how long the trainer waited
  std::array<double, lane_count> busy{};        // by lane
  std::array<double, lane_count> critical{};    // by lane: what the step's length is made of
  std::array<std::size_t, lane_count> bytes{};  // by lane: moved, or gone through
};

Simulation simulate(const SimulationInput& input);

// What an operation moves or goes through, and how long that takes.
std::size_t bytes_moved(const Op& op, const Placement& placement);
double seconds_of(const Op& op, const SimulationInput& input);

}  // namespace ballast
