#include "zero/plan/homes.h"

namespace ballast {
namespace {

// Adds the homes of parameters that are kept apart from the tiles' blocks and records.
void add_kept_parameters(const CompileInput& input, const StepSlots& all_slots, std::size_t unit,
                         std::vector<Home>& homes) {
  const UnitLayout& layout = input.layout.units[unit];
  const UnitSlots& slots = all_slots.of(unit);
  const std::size_t width = byte_size(input.model.units[unit].dtype);
  const auto add = [&](const Range& range, std::size_t slot, std::size_t begin) {
    if (range.count == 0 || slot == none) return;
    homes.push_back({.unit = unit, .range = range, .parameters = {slot, begin * width, range.count * width}});
  };
  const Range trained = layout.trained.of_rank(input.rank_in_shard_group);
  const Range frozen = layout.frozen.of_rank(input.rank_in_shard_group);
  if (all_slots.is_gathered_per_use(unit)) {
    const Range kept = input.kept_range(layout.trained);
    add(trained, slots.parameters, trained.first - kept.first);
    add(frozen, slots.parameters, kept.count + frozen.first - input.kept_range(layout.frozen).first);
  } else {
    add({0, layout.elements()}, slots.parameters, 0);
  }
  add(frozen, slots.frozen, 0);
}

// Where parameters are on a drive, those that no step changes have records of their own.
void add_frozen_tiles(const CompileInput& input, const StepSlots& all_slots, std::size_t unit,
                      std::vector<Home>& homes) {
  if (all_slots.residence(unit).parameters != Tier::nvme) return;
  const UnitLayout& layout = input.layout.units[unit];
  for (std::size_t i = 0; i < layout.frozen_tiles.size(); ++i) {
    const std::size_t tile = layout.tiles.size() + i;
    homes.push_back({.unit = unit,
                     .tile = tile,
                     .range = layout.of_rank(input.rank_in_shard_group, tile),
                     .on_drive = true,
                     .frozen = true});
  }
}

Home home_of_tile(const CompileInput& input, const StepSlots& all_slots, std::size_t unit, std::size_t tile) {
  const UnitLayout& layout = input.layout.units[unit];
  const UnitSlots& slots = all_slots.of(unit);
  const BlockSizes& sizes = input.blocks.of(unit);
  Home home{.unit = unit, .tile = tile, .range = layout.of_rank(input.rank_in_shard_group, tile)};
  const std::size_t parameter_bytes = home.range.count * byte_size(input.model.units[unit].dtype);
  switch (all_slots.residence(unit).state[tile]) {
    case Tier::device: home.state = slots.state[tile]; break;
    case Tier::host:
      home.parameters = slots.blocks[tile].part(0, parameter_bytes);
      home.state = slots.blocks[tile].part(sizes.parameter, sizes.state);
      break;
    case Tier::nvme:
      home.on_drive = true;
      if (slots.copies[tile].exists()) home.parameters = slots.copies[tile].part(0, parameter_bytes);
      break;
  }
  return home;
}

}  // namespace

std::vector<Home> homes_of(const CompileInput& input, const StepSlots& slots) {
  std::vector<Home> homes;
  for (std::size_t unit = 0; unit < input.model.units.size(); ++unit) {
    add_kept_parameters(input, slots, unit, homes);
    for (std::size_t tile = 0; tile < input.layout.units[unit].tiles.size(); ++tile) {
      homes.push_back(home_of_tile(input, slots, unit, tile));
    }
    add_frozen_tiles(input, slots, unit, homes);
  }
  return homes;
}

}  // namespace ballast
