#include "zero/plan/tiling.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "zero/plan/residence.h"

namespace ballast {
namespace {

// A copy of so many elements, 4 MiB or more, takes ten times as long as its start, and so does their update on the host.
// Eight of their records take 200 MiB of host memory.
constexpr std::size_t largest_tile = std::size_t{2} << 20;

// The first read and the last write of a step overlap nothing. They are below 2 % of it with so many tiles.
constexpr std::size_t tiles_of_a_rank = 128;

// A drive reaches its bandwidth with requests of this size.
constexpr std::size_t smallest_tile = std::size_t{256} << 10;

// Joins the tiles whose state is on the device, and moves them before the others.
void join_on_device(UnitLayout& unit, const std::vector<Tier>& state) {
  for (std::size_t tile = 0; tile < state.size(); ++tile) {
    if (state[tile] == Tier::device) unit.device_elements += unit.tiles[tile].count;
  }
  unit.tiers.clear();
  if (unit.device_elements > 0) unit.tiers.push_back(Tier::device);
  std::ranges::copy_if(state, std::back_inserter(unit.tiers), [](Tier tier) { return tier != Tier::device; });
  if (unit.device_elements == 0) return;
  const std::size_t shard = unit.trained.shard;
  const auto others = cut({unit.device_elements, shard - unit.device_elements}, unit.tile_elements);
  unit.tiles = {{0, unit.device_elements}};
  unit.tiles.insert(unit.tiles.end(), others.begin(), others.end());
  if (others.empty()) unit.tile_elements = 0;
}

}  // namespace

std::size_t automatic_tile(const Model& model, std::size_t shards, Section UnitLayout::*of) {
  std::size_t elements = 0;
  for (const UnitLayout& unit : make_layout(model, shards, largest_tile).units) {
    elements += (unit.*of).shard;
  }
  return std::bit_floor(std::clamp(elements / tiles_of_a_rank, smallest_tile, largest_tile));
}

Layout lay_out(const Model& model, const Placement& placement, std::size_t tile_elements) {
  if (tile_elements > 0) return make_layout(model, placement.shards, tile_elements);
  const TileSizes sizes{automatic_tile(model, placement.shards),
                        automatic_tile(model, placement.shards, &UnitLayout::frozen)};
  Layout layout = make_layout(model, placement.shards, sizes);
  const std::vector<UnitResidence> residences = reside(placement, layout);
  for (std::size_t unit = 0; unit < layout.units.size(); ++unit) {
    join_on_device(layout.units[unit], residences[unit].state);
  }
  return layout;
}

}  // namespace ballast
