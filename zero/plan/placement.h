// Where parameters, gradients and optimizer state are kept between their uses. This is all that a ZeRO stage means.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "zero/plan/layout.h"

namespace ballast {

// From near to far. Between steps, nothing else holds a byte.
enum class Tier : std::uint8_t { device, host, nvme };
inline constexpr std::size_t tier_count = 3;

std::string_view name(Tier tier);

// Which fraction lies in which tier. They add up to 1.
struct Spread {
  double device = 1.0;
  double host = 0.0;
  double nvme = 0.0;

  std::array<double, tier_count> fractions() const { return {device, host, nvme}; }
  bool operator==(const Spread&) const = default;
};

Spread all_in(Tier tier);

// When gradients are summed over the ranks. Rounding differs between the two, as (a + b) + c does from a + (b + c): bits
// are equal between programs that choose the same.
enum class Reduction : std::uint8_t {
  each,      // after each backward use, into fp32
  boundary,  // once a step: the trainer adds up its micro-steps in whole gradients, in the unit's format
};

struct Placement {
  std::size_t shards = 1;        // ranks that share one copy of the state
  std::size_t replicas = 1;      // copies of it; shards * replicas ranks in all
  bool whole_parameters = true;  // kept gathered between steps
  Reduction reduction = Reduction::each;
  Spread parameters{};  // by unit
  Spread gradients{};   // by unit, reduced ones; never on a drive
  Spread state{};       // by tile: master and moments

  bool operator==(const Placement&) const = default;
};

// Stage 0: every rank has everything. 1 and 2: the optimizer's state and the reduced gradients are shared. 3: and the
// parameters. (1 and 2 are one: nobody needs whole gradients, but where reduction is at the boundary everybody does.)
Placement placement_of_stage(int stage, std::size_t ranks);

// A placement worked out for each unit and tile. Parameters lie no farther than the state that makes them, and gradients
// wait where the update is made, or nearer: fractions give way to that.
struct UnitResidence {
  Tier parameters = Tier::device;
  Tier gradients = Tier::device;
  std::vector<Tier> state{};  // by tile
};

std::vector<UnitResidence> reside(const Placement& placement, const Layout& layout);

// Throws what cannot be: fractions that do not add up, whole parameters that are not on the device, and the like.
void check(const Placement& placement);

}  // namespace ballast
