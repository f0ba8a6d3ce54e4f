// What a step is made with, and what comes of it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "optim/decision.h"
#include "optim/rule.h"
#include "zero/engine/straggler.h"
#include "zero/plan/ledger.h"
#include "zero/plan/simulate.h"

namespace ballast {

// A tile of this rank when a step is decided, in memory of the tiers that the two are in.
struct SummedTile {
  std::size_t unit = 0;
  Range range{};     // of the unit's elements
  View gradients{};  // in fp32, summed over all ranks; nobody needs them afterwards
  View masters{};    // in fp32
  bool gradients_on_gpu = false;
  bool masters_on_gpu = false;
};

// Changes the masters of all tiles, with their gradients times the factor. Called on the trainer's thread; what it has begun
// on a GPU is over when it returns.
using TrainerUpdate = std::function<void(std::span<const SummedTile> tiles, float gradient_factor)>;

struct StepOptions {
  std::span<const optim::Rule> groups;  // by parameter group; read before the call returns
  double max_norm = optim::no_clipping;
  double loss_scale = 1.0;                    // the one that the step's gradients were made with
  bool discard = false;                       // the gradients: nothing is updated
  std::span<const std::uint64_t> begun_at{};  // steps before each group's first one; none: all began with the training
  TrainerUpdate update{};                     // where the rule is External; not called where the step is skipped
};

// What lanes did, and what the trainer waited for. Counted when an operation has ended: the last updates of a step are the
// next one's, where they go on beside its forward pass.
struct Metrics {
  double seconds = 0;
  std::size_t on_demand = 0;                    // steps that left the program's order, and were slower for it
  std::size_t verified = 0;                     // tiles so far: see corruption_check.h
  std::array<std::size_t, lane_count> bytes{};  // by lane: moved, or gone through
  std::array<double, lane_count> busy{};        // seconds, by lane
  std::array<double, lane_count> stalls{};      // seconds that the trainer waited, by the lane of what it waited for
  std::array<double, phase_count> exposed{};    // the same, by phase
  TierBytes memory{};                           // reserved by now

  double own_seconds() const;  // that the trainer took, without what it waited for
  Metrics since(const Metrics& before) const;
};

std::string to_text(const Metrics& metrics);  // a line for each lane that was used, and what is to be said of all

struct StepResult {
  bool skipped = false;
  double norm = 0.0;       // of the averaged, unscaled gradients, before clipping
  std::uint64_t step = 0;  // updates made so far
  std::string reason{};    // why it was skipped, and which parameter was the first to be wrong
  Metrics metrics{};       // since the step before
  Straggler pace{};        // of the step before: of the first there is none
};

// Written before the updates that wait for it, read by them.
struct StepNumbers {
  std::uint64_t number = 0;  // updates made, this one included
  bool skip = false;
  float gradient_factor = 1.0f;
  std::vector<kernels::GroupStep> groups{};
};

}  // namespace ballast
