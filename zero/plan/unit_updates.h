// Updates of units.
#pragma once

#include <map>

#include "zero/plan/gradient_sums.h"
#include "zero/plan/parameter_gathers.h"

namespace ballast {

// Emits the update of a unit, tile by tile, in whichever tier their state lies. Visitors are tiles whose state is on the host and
// comes to the device for the update. They take turns with other tiles, so that both processors work. A rule of whole matrices
// updates in two parts: directions of the unit's tiles go to the ranks that orthogonalize them, and come back to move the
// parameters. With one rank nothing moves.
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
    update.blocks.resize(tiles(unit));
    for (const std::size_t tile : in_turn(unit)) {
      update.blocks[tile] = block_of({unit, tile});
      make_direction({unit, tile}, update.blocks[tile], direction_of({unit, tile}, update.directions));
    }
    end_upload();
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
    for (const std::size_t tile : in_turn(unit)) {
      const TileName name{unit, tile};
      if (update.directions.exists()) {
        update_tile(name, update.blocks[tile],
                    {direction_of(name, update.directions), Tier::device, context_.slots.rings.tile_directions});
      } else {
        update_tile(name, block_of(name), gradient_of(name));
      }
      if (context_.residence(unit).state[tile] == Tier::nvme) records_.write_back();
    }
    end_upload();
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
  // What a tile keeps in one tier: the state, and on the host the parameter too.
  struct Block {
    Piece memory{};
    BlockSizes sizes{};
    bool on_device = false;

    Piece state() const { return memory.part(sizes.parameter, sizes.state); }
  };
  // What a tile is updated from, and the buffers that bring it to the host.
  struct Source {
    Piece values{};
    Tier tier = Tier::device;
    Ring& on_its_way;
  };
  // A tile's block and what it is updated from, in the tier where it is updated.
  struct Visit {
    Block block{};
    Piece values{};
  };
  // A copy to the device that is due.
  struct Upload {
    TileName name{};
    Piece from{};
    Piece to{};
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

  void make_direction(const TileName& name, const Block& home, const Piece& direction) {
    const Visit visit = begin_visit(name, home, gradient_of(name));
    const bool passes = !visit.block.on_device && !context_.input.host_is_device;
    const Piece to = passes ? context_.slots.rings.tile_directions.next(direction.bytes) : direction;
    add_update(OpKind::momentum, name, visit, to);
    if (passes) upload_later(name, to, direction);
    end_visit(name, home, visit.block);
  }

  // The parameter is updated in its block. If the block has none, it is updated where memory keeps it, or in a copy on the host
  // that is on its way to another tier.
  void update_tile(const TileName& name, const Block& home, const Source& from) {
    const UnitResidence& at = context_.residence(name.unit);
    const Visit visit = begin_visit(name, home, from);
    const Piece kept = kept_apart(name);
    const std::size_t parameter_bytes = context_.layout(name.unit).tiles[name.tile].count * context_.width(name.unit);
    Piece parameter = kept;
    if (visit.block.sizes.parameter > 0) {
      parameter = visit.block.memory.part(0, parameter_bytes);
    } else if (!visit.block.on_device) {
      parameter = on_host(name, {kept, at.parameters, context_.slots.rings.tile_parameters});
    }
    add_update(OpKind::update, name, visit, parameter);
    if (kept.exists() && kept != parameter) {
      if (at.parameters == Tier::device) {
        upload_later(name, parameter, kept);
      } else {
        move(OpKind::keep, Lane::host, name, parameter, kept);
      }
    }
    end_visit(name, home, visit.block);
  }

  void add_update(OpKind kind, const TileName& name, const Visit& visit, const Piece& to) {
    context_.builder.add({.kind = kind,
                          .lane = visit.block.on_device ? Lane::update : Lane::host,
                          .unit = name.unit,
                          .tile = name.tile,
                          .from = visit.values,
                          .to = to,
                          .state = visit.block.state()},
                         context_.agreement);
  }

  // Brings what a tile is updated from to its block, or both to the device.
  Visit begin_visit(const TileName& name, const Block& home, const Source& from) {
    if (home.on_device) return {home, from.values};
    if (!context_.slots.is_visitor(name.unit, name.tile)) {
      end_upload();
      return {home, on_host(name, from)};
    }
    const std::size_t kept =
        home.memory.bytes;  // nothing, if a rule without state updates a parameter that the device keeps
    const std::size_t more = from.tier == Tier::device ? 0 : from.values.bytes;
    Visit visit{{home.memory, home.sizes, true}, from.values};
    if (kept + more == 0) return visit;
    const Piece memory = context_.slots.rings.visitors.next(kept + more);
    if (kept > 0) {
      visit.block.memory = memory.part(0, kept);
      move(OpKind::upload, Lane::upload, name, home.memory, visit.block.memory);
    }
    if (more > 0) {
      visit.values = memory.part(kept, more);
      move(OpKind::upload, Lane::upload, name, from.values, visit.values);
    }
    return visit;
  }

  void end_visit(const TileName& name, const Block& home, const Block& block) {
    if (block.memory != home.memory) move(OpKind::download, Lane::download, name, block.memory, home.memory);
  }

  // Uploads what an update on the host has made when the next one begins there, or at the end of the unit: the visitors until then
  // need not wait for the host.
  void upload_later(const TileName& name, const Piece& from, const Piece& to) {
    upload_ = {name, from, to};
    const bool is_record = context_.residence(name.unit).state[name.tile] == Tier::nvme;  // its memory is needed again
    if (is_record || context_.slots.visitors(name.unit) == 0) end_upload();
  }

  void end_upload() {
    if (upload_) move(OpKind::upload, Lane::upload, upload_->name, upload_->from, upload_->to);
    upload_.reset();
  }

  // The tiles of a unit in the order in which their updates begin.
  std::vector<std::size_t> in_turn(std::size_t unit) const {
    std::array<std::vector<std::size_t>, 2> kinds;  // visitors, and others
    for (std::size_t tile = 0; tile < tiles(unit); ++tile)
      kinds[context_.slots.is_visitor(unit, tile) ? 0 : 1].push_back(tile);
    const auto& [visitors, others] = kinds;
    std::vector<std::size_t> order;
    for (std::size_t visitor = 0, other = 0; order.size() < tiles(unit);) {
      const bool is_others_turn = other * visitors.size() <= visitor * others.size();
      const bool takes_other = visitor == visitors.size() || (other < others.size() && is_others_turn);
      order.push_back(takes_other ? others[other++] : visitors[visitor++]);
    }
    return order;
  }

  Block block_of(const TileName& name) {  // reads a record
    const UnitSlots& slots = context_.slots.of(name.unit);
    switch (context_.residence(name.unit).state[name.tile]) {
      case Tier::device: break;
      case Tier::host: {
        const BlockSizes sizes = context_.slots.block_sizes(name.unit, name.tile);
        return {slots.blocks[name.tile], sizes};
      }
      case Tier::nvme: {
        const BlockSizes sizes = context_.input.blocks.in_record(name.unit);
        return {records_.next().part(context_.input.blocks.records().payload, sizes.bytes()), sizes};
      }
    }
    const Piece& state = slots.state[name.tile];
    return {state, {.parameter = 0, .state = state.bytes}, true};
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
  std::optional<Upload> upload_{};
};

}  // namespace ballast
