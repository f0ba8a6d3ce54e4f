#include "zero/plan/tile_updates.h"

#include <algorithm>

namespace ballast {

void TileUpdates::update(std::size_t unit) {
  for (std::size_t tile = 0; tile < context_.layout(unit).tiles.size(); ++tile) {
    update_tile(unit, tile);
  }
}

void TileUpdates::carry_over(std::size_t unit) {
  for (const Tier tier : context_.residence(unit).state) {
    if (tier != Tier::nvme) continue;
    parts_.records.next();
    parts_.records.write_back(parts_.waits.agreement());
  }
}

void TileUpdates::update_tile(std::size_t unit, std::size_t tile) {
  const Blocks& blocks = context_.input.blocks;
  switch (context_.residence(unit).state[tile]) {
    case Tier::device: return update_on_device(unit, tile);
    case Tier::host: return update_on_host(unit, tile, context_.slots.of(unit).blocks[tile], blocks.of(unit));
    case Tier::nvme: {
      const Piece record = parts_.records.next();
      const BlockSizes sizes = blocks.in_record(unit);
      update_on_host(unit, tile, record.part(blocks.records().payload, sizes.bytes()), sizes);
      return parts_.records.write_back(parts_.waits.agreement());
    }
  }
}

Piece TileUpdates::gradient_of(std::size_t unit, std::size_t tile) const {
  const auto [first, count] = context_.layout(unit).tiles[tile];
  const std::size_t width = context_.width_of_sums(unit);
  return parts_.gradients.summed(unit).part(first * width, count * width);
}

void TileUpdates::update_on_device(std::size_t unit, std::size_t tile) {
  context_.builder.add({.kind = OpKind::update,
                        .lane = Lane::update,
                        .unit = unit,
                        .tile = tile,
                        .from = gradient_of(unit, tile),
                        .to = parts_.parameters.kept_tile(unit, tile),
                        .state = context_.slots.of(unit).state[tile]},
                       parts_.waits.agreement());
}

// Returns the tile's parameter if memory keeps it outside the block: alone, or as a copy.
Piece TileUpdates::kept_apart(std::size_t unit, std::size_t tile) const {
  switch (context_.residence(unit).parameters) {
    case Tier::device: return parts_.parameters.kept_tile(unit, tile);
    case Tier::host: {
      const Piece& copy = context_.slots.of(unit).copies[tile];
      const std::size_t bytes = context_.layout(unit).tiles[tile].count * context_.width(unit);
      return copy.exists() ? copy.part(0, bytes) : Piece{};
    }
    case Tier::nvme: return {};
  }
  return {};
}

// The parameter is updated in its block. Where the block has none, it is updated where the host keeps it, or in a copy
// on its way through.
void TileUpdates::update_on_host(std::size_t unit, std::size_t tile, const Piece& block, const BlockSizes& sizes) {
  const UnitResidence& at = context_.residence(unit);
  const auto move = [&](OpKind kind, Lane lane, const Piece& from, const Piece& to) {
    context_.builder.add({.kind = kind, .lane = lane, .unit = unit, .tile = tile, .from = from, .to = to});
  };
  const auto on_host = [&](const Piece& piece, Tier tier, Ring& on_its_way) {
    if (tier != Tier::device || context_.input.host_is_device) return piece;
    const Piece copy = on_its_way.next(piece.bytes);
    move(OpKind::download, Lane::download, piece, copy);
    return copy;
  };
  const Piece gradient = on_host(gradient_of(unit, tile), at.gradients, context_.slots.rings.tile_gradients);
  const Piece kept = kept_apart(unit, tile);
  const std::size_t parameter_bytes = context_.layout(unit).tiles[tile].count * context_.width(unit);
  const Piece parameter = sizes.parameter > 0 ? block.part(0, parameter_bytes)
                                              : on_host(kept, at.parameters, context_.slots.rings.tile_parameters);
  context_.builder.add({.kind = OpKind::update,
                        .lane = Lane::host,
                        .unit = unit,
                        .tile = tile,
                        .from = gradient,
                        .to = parameter,
                        .state = block.part(sizes.parameter, sizes.state)},
                       parts_.waits.agreement());
  if (!kept.exists() || kept == parameter) return;
  if (at.parameters == Tier::device) {
    move(OpKind::upload, Lane::upload, parameter, kept);
  } else {
    move(OpKind::keep, Lane::host, parameter, kept);
  }
}

}  // namespace ballast
