// The numbers of a step that its updates use.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/orthogonalize.h"
#include "kernels/update.h"

namespace ballast {

// Written by the agreement, before the updates that wait for it read it.
struct StepNumbers {
  std::uint64_t number = 0;  // updates made, this one included
  bool skip = false;
  float gradient_factor = 1.0f;
  std::vector<kernels::GroupStep> groups{};
  // Of a rule of whole matrices: how each group's are orthogonalized, and the update with the result, by MatrixGroups.
  std::vector<kernels::NewtonSchulz> orthogonalizations{};
  std::vector<kernels::GroupStep> matrices{};
};

}  // namespace ballast
