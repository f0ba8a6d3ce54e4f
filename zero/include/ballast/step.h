// The options of a step, its result, and its metrics.
#pragma once

#include <ballast/model.h>
#include <ballast/optim.h>
#include <ballast/placement.h>
#include <ballast/schedule.h>
#include <ballast/state_format.h>
#include <ballast/view.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace ballast {

// A part of a tensor in a tile. Padding between the parts of a tile belongs to none.
struct TilePart {
  std::size_t tensor = 0;  // its number in the unit
  std::size_t group = 0;
  Range range{};          // a range of the tensor's elements
  std::size_t first = 0;  // element of the tile where the part begins
};

// A tile of this rank when a step is decided.
struct SummedTile {
  std::size_t unit = 0;
  Range range{};  // a range of the unit's elements
  std::vector<TilePart> parts{};
  View gradients{};  // summed over all ranks, in the format in which they are kept; may be overwritten
  View masters{};    // fp32 values
  OwnValues own{};   // values of the rule External, where the masters are
  bool gradients_on_gpu = false;
  bool masters_on_gpu = false;
};

// The tiles that the trainer updates in one call: all that memory keeps, or one whose state is in memory for a while.
struct TilesToUpdate {
  std::span<const SummedTile> tiles;
  float gradient_factor = 1.0f;
  bool is_last = false;  // call of this step
};

// Changes the masters and own values of tiles, with their gradients times the factor. A step calls it once for the tiles that
// memory keeps, and then for each other tile; and at least once. Called on the trainer's thread; work that it issued to a GPU
// must be done when it returns.
using TrainerUpdate = std::function<void(const TilesToUpdate& turn)>;

struct StepOptions {
  // One rule for each parameter group, of the kind that the training was planned with; copied before the call returns.
  // Empty: Training::groups().
  std::span<const optim::Rule> groups{};
  std::optional<double> max_norm{};  // none: TrainingOptions::max_norm
  double loss_scale = 1.0;           // the scale with which the step's gradients were made
  // The micro-steps whose gradients were accumulated, over which the step averages them. None: TrainingOptions::micro_steps.
  // Another number than was accumulated is refused (B1007): see TrainingOptions::micro_steps.
  std::optional<std::size_t> micro_steps{};
  bool discard = false;  // drop the gradients: nothing is updated
  // The training's steps that did not update a tensor, for each tensor, unit by unit. They are those before its first
  // one, and those of Training::leave_out(). Empty: none. Bias corrections and the like count the other steps.
  std::span<const std::uint64_t> missed{};
  TrainerUpdate update{};  // belongs to the rule External only; not called when the step is skipped
};

// What lanes did, and what the trainer waited for. An operation counts when it ends: updates that run during the next
// forward pass count in the next step.
struct Metrics {
  double seconds = 0;
  std::size_t on_demand = 0;  // off-plan steps, which are slower
  std::size_t repeated = 0;   // steps so far whose updates were made again, or undone: see Schedule::most_repeats
  double repeat_seconds = 0;  // so far, that the trainer waited for these
  std::size_t verified = 0;   // tiles so far whose updates were made twice, or stretches of large ones
  std::array<std::size_t, lane_count> bytes{};  // bytes moved or processed, for each lane
  std::array<double, lane_count> busy{};        // seconds, by lane
  std::array<double, lane_count> stalls{};      // seconds that the trainer waited, by the lane it waited for
  std::array<double, phase_count> exposed{};    // the same, by phase
  bool timed = true;                            // false on a GPU without a timeline: only times on the host are known
  std::size_t sent_inside = 0;                  // bytes that this rank sent to ranks of its host
  std::size_t sent_across = 0;                  // bytes that it sent to other hosts
  TierBytes memory{};                           // reserved now

  double own_seconds() const;  // seconds of the trainer, without its waits; if timed
  Metrics since(const Metrics& before) const;
};

std::string to_text(const Metrics& metrics);  // a line for each lane that was used, then the sums

// The rank that the others wait for; empty if ranks do not know their own times.
struct Straggler {
  std::size_t slowest = 0;  // a rank
  double seconds = 0.0;     // that its trainer took, without its waits
  double median = 0.0;      // the median of all ranks
  double least = 0.0;

  bool operator==(const Straggler&) const = default;
};

std::string to_text(const Straggler& straggler);

struct StepResult {
  bool skipped = false;
  double norm = 0.0;       // the norm of the averaged, unscaled gradients, before clipping
  std::uint64_t step = 0;  // updates made so far
  std::string reason{};    // why it was skipped, with the first parameter that is not finite
  Metrics metrics{};       // since the last step
  Straggler straggler{};   // the straggler of the last step; empty in the first
};

std::string to_text(const StepResult& result);  // one line: the step, its norm and time, the waits, and memory by tier

}  // namespace ballast
