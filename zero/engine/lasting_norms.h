// The gradients of a step where they stay after their norms were taken.
#pragma once

#include <vector>

#include "zero/plan/program.h"

namespace ballast {

// An operation that takes the norm of gradients that stay where they are.
struct LastingNorm {
  Op norm;
  std::size_t download = none;  // operation that took them there, if the program takes their norm on their way
};

std::vector<LastingNorm> lasting_norms(const std::vector<Op>& list);

}  // namespace ballast
