// The numbers of a step that its updates use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/orthogonalize.h"
#include "kernels/update.h"
#include "zero/plan/layout.h"

namespace ballast {

// Written by the agreement, before the updates that wait for it read it.
struct StepNumbers {
  std::uint64_t number = 0;  // updates made, this one included
  bool skip = false;
  float gradient_factor = 1.0f;
  std::vector<kernels::GroupStep> groups{};  // one for each parameter group, and for tensors that have missed steps
  // Says for each unit and tensor which of `groups` updates it; none: it stays as it is. If empty, its parameter group
  // does.
  std::vector<std::vector<std::size_t>> group_of{};
  // A rule of whole matrices has these: how each group's are orthogonalized, and the update with the result, by
  // MatrixGroups.
  std::vector<kernels::NewtonSchulz> orthogonalizations{};
  std::vector<kernels::GroupStep> matrices{};

  std::span<const std::size_t> groups_of(std::size_t unit) const {
    return group_of.empty() ? std::span<const std::size_t>() : group_of[unit];
  }
  bool leaves_out(std::size_t unit, std::size_t tensor) const {
    return !group_of.empty() && group_of[unit][tensor] == none;
  }
  void leave_out(std::size_t unit, std::size_t tensor) { group_of[unit][tensor] = none; }
};

}  // namespace ballast
