// The cost of one operation on a machine, if it does not wait.
#pragma once

#include <ballast/planner.h>

#include <span>

#include "zero/plan/program.h"

namespace ballast {

struct SimulationInput {
  const Program& program;
  Placement placement;
  Machine machine;
  std::span<const UnitWork> work;  // by unit
  bool waits_for_updates = false;  // the trainer begins no step before the updates of the last one are done
};

std::size_t bytes_moved(const Op& op, const Placement& placement);  // or processed
double seconds_of(const Op& op, const SimulationInput& input);

}  // namespace ballast
