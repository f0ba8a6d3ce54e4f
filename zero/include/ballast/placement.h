// The tiers in which parameters, gradients and optimizer state are kept between their uses. A ZeRO stage means nothing
// more.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ballast {

// From near to far.
enum class Tier : std::uint8_t { device, host, nvme };
inline constexpr std::size_t tier_count = 3;
using TierBytes = std::array<std::size_t, tier_count>;

std::string_view name(Tier tier);

// The fraction that is kept in each tier. They add up to 1.
struct Spread {
  double device = 1.0;
  double host = 0.0;
  double nvme = 0.0;

  std::array<double, tier_count> fractions() const { return {device, host, nvme}; }
  bool operator==(const Spread&) const = default;
};

Spread all_in(Tier tier);

// When gradients are summed over the ranks. The two round differently, as (a + b) + c and a + (b + c) do. Programs with
// the same choice give equal bits.
enum class Reduction : std::uint8_t {
  each,      // after each backward use
  boundary,  // once a step: the trainer adds up its micro-steps in full gradients, in the unit's format
};

struct Placement {
  std::size_t shards = 1;       // ranks that share one copy of the state
  std::size_t replicas = 1;     // copies of it
  bool full_parameters = true;  // kept gathered between steps
  Reduction reduction = Reduction::each;
  Spread parameters{};  // by unit
  Spread gradients{};   // by unit, reduced ones; never on a drive
  Spread state{};       // by tile: master and moments
  // Of stage 3: copies of the parameters. Neighbouring ranks share one, and gather from each other only.
  std::size_t parameter_replicas = 1;

  std::size_t ranks() const { return shards * replicas; }
  // Ranks form groups of neighbours. Gradients are summed inside of the groups first, and then over them.
  std::size_t ranks_per_group() const { return shards / parameter_replicas; }
  std::size_t groups() const { return replicas * parameter_replicas; }
  bool operator==(const Placement&) const = default;
};

// Stage 0: every rank keeps everything. 1 and 2: ranks shard the optimizer's state and the reduced gradients. 3: they
// shard the parameters too. Stages 1 and 2 are equal: the reduction decides whether a rank keeps full gradients.
Placement placement_of_stage(int stage, std::size_t ranks);

// Throws B1001 for fractions that do not add up, full parameters outside the device, gradients on a drive.
void check(const Placement& placement);

}  // namespace ballast
