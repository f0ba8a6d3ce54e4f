#include "zero/plan/tile_updates.h"

#include <algorithm>

namespace ballast {

void TileUpdates::update(std::size_t unit) {
  for (std::size_t tile = 0; tile < context_.layout(unit).tiles.size(); ++tile) {
    const TileName name{unit, tile};
    const bool on_drive = is_on_drive(name);
    update_tile(name, on_drive ? block_of_record(unit, parts_.records.next()) : block_in_memory(name),
                gradient_of(name));
    if (on_drive) parts_.records.write_back(parts_.waits.agreement());
  }
}

void TileUpdates::make_directions(std::size_t unit, const Piece& directions) {
  for (std::size_t tile = 0; tile < context_.layout(unit).tiles.size(); ++tile) {
    const TileName name{unit, tile};
    if (is_on_drive(name)) held_[name] = block_of_record(unit, parts_.records.next());
    make_direction(name, is_on_drive(name) ? held_[name] : block_in_memory(name), direction_of(name, directions));
  }
}

void TileUpdates::update_from(std::size_t unit, const Piece& directions) {
  for (std::size_t tile = 0; tile < context_.layout(unit).tiles.size(); ++tile) {
    const TileName name{unit, tile};
    const bool on_drive = is_on_drive(name);
    update_tile(name, on_drive ? held_[name] : block_in_memory(name),
                {direction_of(name, directions), Tier::device, context_.slots.rings.tile_directions});
    if (!on_drive) continue;
    parts_.records.write_back(parts_.waits.agreement());
    held_.erase(name);
  }
}

void TileUpdates::carry_over(std::size_t unit) {
  for (const Tier tier : context_.residence(unit).state) {
    if (tier != Tier::nvme) continue;
    parts_.records.next();
    parts_.records.write_back(parts_.waits.agreement());
  }
}

bool TileUpdates::is_on_drive(const TileName& name) const {
  return context_.residence(name.unit).state[name.tile] == Tier::nvme;
}

TileUpdates::Block TileUpdates::block_in_memory(const TileName& name) const {
  if (context_.residence(name.unit).state[name.tile] == Tier::device) return {};
  return {context_.slots.of(name.unit).blocks[name.tile], context_.input.blocks.of(name.unit)};
}

TileUpdates::Block TileUpdates::block_of_record(std::size_t unit, const Piece& record) const {
  const BlockSizes sizes = context_.input.blocks.in_record(unit);
  return {record.part(context_.input.blocks.records().payload, sizes.bytes()), sizes};
}

TileUpdates::Source TileUpdates::gradient_of(const TileName& name) const {
  const auto [first, count] = context_.layout(name.unit).tiles[name.tile];
  const std::size_t width = context_.width_of_sums(name.unit);
  return {parts_.gradients.summed(name.unit).part(first * width, count * width),
          context_.residence(name.unit).gradients, context_.slots.rings.tile_gradients};
}

Piece TileUpdates::direction_of(const TileName& name, const Piece& directions) const {
  const auto [first, count] = context_.layout(name.unit).tiles[name.tile];
  return directions.part(first * byte_size(DType::bf16), count * byte_size(DType::bf16));
}

void TileUpdates::move(OpKind kind, Lane lane, const TileName& name, const Piece& from, const Piece& to) const {
  context_.builder.add({.kind = kind, .lane = lane, .unit = name.unit, .tile = name.tile, .from = from, .to = to});
}

Piece TileUpdates::on_host(const TileName& name, const Source& source) const {
  if (source.tier != Tier::device || context_.input.host_is_device) return source.values;
  const Piece copy = source.on_its_way.next(source.values.bytes);
  move(OpKind::download, Lane::download, name, source.values, copy);
  return copy;
}

// The state is in the block, or on the device.
void TileUpdates::make_direction(const TileName& name, const Block& block, const Piece& direction) {
  const bool on_device = !block.memory.exists();
  const Source gradient = gradient_of(name);
  const bool passes = !on_device && !context_.input.host_is_device;
  const Piece from = on_device ? gradient.values : on_host(name, gradient);
  const Piece to = passes ? context_.slots.rings.tile_directions.next(direction.bytes) : direction;
  context_.builder.add({.kind = OpKind::momentum,
                        .lane = on_device ? Lane::update : Lane::host,
                        .unit = name.unit,
                        .tile = name.tile,
                        .from = from,
                        .to = to,
                        .state = on_device ? context_.slots.of(name.unit).state[name.tile] : block.state()},
                       parts_.waits.agreement());
  if (passes) move(OpKind::upload, Lane::upload, name, to, direction);
}

void TileUpdates::update_tile(const TileName& name, const Block& block, const Source& from) {
  if (block.memory.exists()) return update_on_host(name, block, from);
  context_.builder.add({.kind = OpKind::update,
                        .lane = Lane::update,
                        .unit = name.unit,
                        .tile = name.tile,
                        .from = from.values,
                        .to = parts_.parameters.kept_tile(name.unit, name.tile),
                        .state = context_.slots.of(name.unit).state[name.tile]},
                       parts_.waits.agreement());
}

// Returns the tile's parameter if memory keeps it outside the block: alone, or as a copy.
Piece TileUpdates::kept_apart(const TileName& name) const {
  switch (context_.residence(name.unit).parameters) {
    case Tier::device: return parts_.parameters.kept_tile(name.unit, name.tile);
    case Tier::host: {
      const Piece& copy = context_.slots.of(name.unit).copies[name.tile];
      const std::size_t bytes = context_.layout(name.unit).tiles[name.tile].count * context_.width(name.unit);
      return copy.exists() ? copy.part(0, bytes) : Piece{};
    }
    case Tier::nvme: return {};
  }
  return {};
}

// The parameter is updated in its block. Where the block has none, it is updated where the host keeps it, or in a copy
// on its way through.
void TileUpdates::update_on_host(const TileName& name, const Block& block, const Source& from) {
  const UnitResidence& at = context_.residence(name.unit);
  const Piece values = on_host(name, from);
  const Piece kept = kept_apart(name);
  const std::size_t parameter_bytes = context_.layout(name.unit).tiles[name.tile].count * context_.width(name.unit);
  const Piece parameter = block.sizes.parameter > 0
                              ? block.memory.part(0, parameter_bytes)
                              : on_host(name, {kept, at.parameters, context_.slots.rings.tile_parameters});
  context_.builder.add({.kind = OpKind::update,
                        .lane = Lane::host,
                        .unit = name.unit,
                        .tile = name.tile,
                        .from = values,
                        .to = parameter,
                        .state = block.state()},
                       parts_.waits.agreement());
  if (!kept.exists() || kept == parameter) return;
  if (at.parameters == Tier::device) {
    move(OpKind::upload, Lane::upload, name, parameter, kept);
  } else {
    move(OpKind::keep, Lane::host, name, parameter, kept);
  }
}

}  // namespace ballast
