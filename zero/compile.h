// Turns a model, its layout and a placement into the program of one training step. Pure: no threads, clock, CUDA or files.
#pragma once

#include "optim/state_layout.h"
#include "zero/layout.h"
#include "zero/placement.h"
#include "zero/program.h"

namespace ballast {

struct CompileInput {
  const Model& model;
  const Layout& layout;
  Placement placement;
  std::size_t rank_in_shard_group = 0;
  std::size_t micro_steps = 1;
  std::size_t state_bytes_per_tile = 0;
};

// The model has at least one unit, and one number format.
Program compile(const CompileInput& input);

}  // namespace ballast
