// Where parameters, gradients and optimizer state are kept between their uses. This is all that a ZeRO stage means.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast {

enum class Tier : std::uint8_t { host, nvme };

struct Placement {
  std::size_t shards = 1;        // ranks that share one copy of the state; the others hold copies of it
  bool whole_parameters = true;  // kept gathered between steps
  bool whole_gradients = true;   // kept for every unit at once
  Tier state = Tier::host;
  std::size_t gathered_units = 2;  // how many units' buffers exist where they are not kept
};

// Stage 0: every rank has everything. 1: shares the optimizer's state. 2: and the gradients. 3: and the parameters.
Placement placement_of_stage(int stage, std::size_t ranks, Tier state);

}  // namespace ballast
