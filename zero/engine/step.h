// The options of a step, its result, and its metrics.
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

// A tile of this rank when a step is decided: gradients and masters, each in its own tier.
struct SummedTile {
  std::size_t unit = 0;
  Range range{};     // of the unit's elements
  View gradients{};  // in fp32, summed over all ranks; may be overwritten
  View masters{};    // in fp32
  bool gradients_on_gpu = false;
  bool masters_on_gpu = false;
};

// Changes the masters of all tiles, with their gradients times the factor. Called on the trainer's thread; work that it issued
// to a GPU must be done when it returns.
using TrainerUpdate = std::function<void(std::span<const SummedTile> tiles, float gradient_factor)>;

struct StepOptions {
  std::span<const optim::Rule> groups;  // by parameter group; copied before the call returns
  double max_norm = optim::no_clipping;
  double loss_scale = 1.0;  // with which the step's gradients were made
  bool discard = false;     // drop the gradients: nothing is updated
  std::span<const std::uint64_t>
      begun_at{};          // number of steps before each group's first; empty: all began with the training
  TrainerUpdate update{};  // for the rule External only; not called when the step is skipped
};

// What lanes did, and what the trainer waited for. An operation counts when it ends: updates that run during the next
// forward pass count in the next step.
struct Metrics {
  double seconds = 0;
  std::size_t on_demand = 0;                    // off-plan steps, which are slower
  std::size_t verified = 0;                     // tiles so far; see corruption_check.h
  std::array<std::size_t, lane_count> bytes{};  // by lane: moved or processed
  std::array<double, lane_count> busy{};        // seconds, by lane
  std::array<double, lane_count> stalls{};      // seconds that the trainer waited, by the lane it waited for
  std::array<double, phase_count> exposed{};    // the same, by phase
  TierBytes memory{};                           // reserved now

  double own_seconds() const;  // of the trainer, without its waits
  Metrics since(const Metrics& before) const;
};

std::string to_text(const Metrics& metrics);  // a line for each lane that was used, then the sums

struct StepResult {
  bool skipped = false;
  double norm = 0.0;       // of the averaged, unscaled gradients, before clipping
  std::uint64_t step = 0;  // updates made so far
  std::string reason{};    // why it was skipped, with the first parameter that is not finite
  Metrics metrics{};       // since the last step
  Straggler straggler{};   // of the last step; empty in the first
};

// What updates need of their step. Written by the agreement, before the updates that wait for it read it.
struct StepNumbers {
  std::uint64_t number = 0;  // updates made, this one included
  bool skip = false;
  float gradient_factor = 1.0f;
  std::vector<kernels::GroupStep> groups{};
};

}  // namespace ballast
