// What a step is made with. Written before the updates that wait for it, read by them.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "optim/decision.h"
#include "optim/rule.h"

namespace ballast {

struct StepOptions {
  std::span<const optim::Rule> groups;  // by parameter group; read before the call returns
  double max_norm = optim::no_clipping;
  double loss_scale = 1.0;  // the one that the step's gradients were made with
};

struct StepResult {
  bool skipped = false;
  double norm = 0.0;       // of the averaged, unscaled gradients, before clipping
  std::uint64_t step = 0;  // updates made so far
  std::string reason{};    // why it was skipped, and which parameter was the first to be wrong
};

struct StepNumbers {
  std::uint64_t number = 0;  // updates made, this one included
  bool skip = false;
  std::vector<kernels::GroupStep> groups{};
};

}  // namespace ballast
