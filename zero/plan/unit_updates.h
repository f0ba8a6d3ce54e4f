// Updates of units.
#pragma once

#include <map>

#include "zero/plan/gradient_sums.h"
#include "zero/plan/parameter_gathers.h"

namespace ballast {

// Emits the update of a unit, tile by tile, in whichever tier their state lies. A rule of whole matrices updates in two parts:
// directions of the unit's tiles go to the ranks that orthogonalize them, and come back to move the parameters. With one rank
// nothing moves.
class UnitUpdates {
 public:
  UnitUpdates(CompileContext& context, const ParameterGathers& parameters, const GradientSums& gradients,
              RecordStream& records)
      : context_(context), parameters_(parameters), gradients_(gradients), records_(records) {}

  // Updates end in the order in which they begin. A second update may begin before the first ends if the slots have memory for
  // both: directions of the second unit are then collected while products of the first are computed.
  void begin(std::size_t unit) {
    if (!needs_matrices(unit)) return;
    StepRings& rings = context_.slots.rings;
    Begun& update = begun_[unit];
    update.directions = rings.directions.next(context_.layout(unit).trained.shard * byte_size(DType::bf16));
    for (std::size_t tile = 0; tile < tiles(unit); ++tile) {
      update.blocks.push_back(block_of({unit, tile}));
      make_direction({unit, tile}, update.blocks.back(), direction_of({unit, tile}, update.directions));
    }
    update.matrices = update.directions;
    if (context_.input.placement.shards == 1) return;
    update.matrices = rings.matrices.next(context_.slots.matrices(unit).elements * byte_size(DType::bf16));
    context_.builder.add(
        {.kind = OpKind::collect, .lane = Lane::reduce, .unit = unit, .from = update.directions, .to = update.matrices},
        context_.agreement);
  }

  void end(std::size_t unit) {
    Begun update;
    if (needs_matrices(unit)) {
      update = begun_.extract(unit).mapped();
      orthogonalize(unit, update);
    }
    for (std::size_t tile = 0; tile < tiles(unit); ++tile) {
      const TileName name{unit, tile};
      if (update.directions.exists()) {
        update_tile(name, update.blocks[tile],
                    {direction_of(name, update.directions), Tier::device, context_.slots.rings.tile_directions});
      } else {
        update_tile(name, block_of(name), gradient_of(name));
      }
      if (context_.residence(unit).state[tile] == Tier::nvme) records_.write_back();
    }
  }

  // Leaves a unit without gradients as it is, but writes its records, because the next generation needs them too.
  void carry_over(std::size_t unit) {
    for (const Tier tier : context_.residence(unit).state) {
      if (tier != Tier::nvme) continue;
      records_.next();
      records_.write_back();
    }
  }

 private:
  // What a tile keeps on the host.
  struct Block {
    Piece memory{};
    BlockSizes sizes{};

    Piece state() const { return memory.part(sizes.parameter, sizes.state); }
  };
  // What a tile is updated from, and the buffers that bring it to the host.
  struct Source {
    Piece values{};
    Tier tier = Tier::device;
    Ring& on_its_way;
  };
  // An update by whole matrices that has begun: its memory, and the blocks of the unit's tiles.
  struct Begun {
    Piece directions{};  // directions of the unit's tiles, on the device
    Piece matrices{};
    std::vector<Block> blocks{};
  };

  void orthogonalize(std::size_t unit, const Begun& update) {
    const double steps = static_cast<double>(*context_.input.orthogonalization_steps);
    context_.builder.add({.kind = OpKind::orthogonalize,
                          .lane = Lane::update,
                          .unit = unit,
                          .operations = steps * context_.slots.matrices(unit).operations,
                          .to = update.matrices,
                          .state = context_.slots.workspace()},
                         context_.agreement);
    if (context_.input.placement.shards == 1) return;
    context_.builder.add({.kind = OpKind::distribute,
                          .lane = Lane::reduce,
                          .unit = unit,
                          .from = update.matrices,
                          .to = update.directions},
                         context_.agreement);
  }

  // The state is in the block, or on the device.
  void make_direction(const TileName& name, const Block& block, const Piece& direction) {
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
                         context_.agreement);
    if (passes) move(OpKind::upload, Lane::upload, name, to, direction);
  }

  void update_tile(const TileName& name, const Block& block, const Source& from) {
    if (block.memory.exists()) return update_on_host(name, block, from);
    context_.builder.add({.kind = OpKind::update,
                          .lane = Lane::update,
                          .unit = name.unit,
                          .tile = name.tile,
                          .from = from.values,
                          .to = parameters_.kept_tile(name.unit, name.tile),
                          .state = context_.slots.of(name.unit).state[name.tile]},
                         context_.agreement);
  }

  // The parameter is updated in its block. If the block has none, it is updated in the host's memory, or in a copy that is on its
  // way to another tier.
  void update_on_host(const TileName& name, const Block& block, const Source& from) {
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
                         context_.agreement);
    if (!kept.exists() || kept == parameter) return;
    if (at.parameters == Tier::device) {
      move(OpKind::upload, Lane::upload, name, parameter, kept);
    } else {
      move(OpKind::keep, Lane::host, name, parameter, kept);
    }
  }

  Block block_of(const TileName& name) {  // none on the device; reads a record
    switch (context_.residence(name.unit).state[name.tile]) {
      case Tier::device: break;
      case Tier::host: return {context_.slots.of(name.unit).blocks[name.tile], context_.input.blocks.of(name.unit)};
      case Tier::nvme: {
        const BlockSizes sizes = context_.input.blocks.in_record(name.unit);
        return {records_.next().part(context_.input.blocks.records().payload, sizes.bytes()), sizes};
      }
    }
    return {};
  }

  Source gradient_of(const TileName& name) const {
    const auto [first, count] = context_.layout(name.unit).tiles[name.tile];
    const std::size_t width = context_.width_of_sums(name.unit);
    return {gradients_.summed(name.unit).part(first * width, count * width), context_.residence(name.unit).gradients,
            context_.slots.rings.tile_gradients};
  }

  Piece direction_of(const TileName& name, const Piece& directions) const {
    const auto [first, count] = context_.layout(name.unit).tiles[name.tile];
    return directions.part(first * byte_size(DType::bf16), count * byte_size(DType::bf16));
  }

  Piece on_host(const TileName& name, const Source& source) const {
    if (source.tier != Tier::device || context_.input.host_is_device) return source.values;
    const Piece copy = source.on_its_way.next(source.values.bytes);
    move(OpKind::download, Lane::download, name, source.values, copy);
    return copy;
  }

  // Returns the tile's parameter if memory keeps it outside the block: alone, or as a copy.
  Piece kept_apart(const TileName& name) const {
    switch (context_.residence(name.unit).parameters) {
      case Tier::device: return parameters_.kept_tile(name.unit, name.tile);
      case Tier::host: {
        const Piece& copy = context_.slots.of(name.unit).copies[name.tile];
        const std::size_t bytes = context_.layout(name.unit).tiles[name.tile].count * context_.width(name.unit);
        return copy.exists() ? copy.part(0, bytes) : Piece{};
      }
      case Tier::nvme: return {};
    }
    return {};
  }

  void move(OpKind kind, Lane lane, const TileName& name, const Piece& from, const Piece& to) const {
    context_.builder.add({.kind = kind, .lane = lane, .unit = name.unit, .tile = name.tile, .from = from, .to = to});
  }

  std::size_t tiles(std::size_t unit) const { return context_.layout(unit).tiles.size(); }
  bool needs_matrices(std::size_t unit) const { return context_.input.needs_matrices() && tiles(unit) > 0; }

  CompileContext& context_;
  const ParameterGathers& parameters_;
  const GradientSums& gradients_;
  RecordStream& records_;
  std::map<std::size_t, Begun> begun_;  // the key is the unit
};

}  // namespace ballast
