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
    for (const Tiles& tiles : in_turn(unit)) {
      const Block& block = update.blocks.emplace_back(block_of(tiles));
      make_direction(tiles, block, direction_of(tiles, update.directions));
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
    const std::vector<Tiles> order = in_turn(unit);
    for (std::size_t i = 0; i < order.size(); ++i) {
      const Tiles& tiles = order[i];
      if (update.directions.exists()) {
        update_tiles(tiles, update.blocks[i],
                     {direction_of(tiles, update.directions), Tier::device, context_.slots.rings.tile_directions});
      } else {
        update_tiles(tiles, block_of(tiles), gradient_of(tiles));
      }
      if (tier_of(tiles) == Tier::nvme) records_.write_back();
    }
    end_upload();
  }

  // Brings the parameters of a unit's records back to the memory that keeps them outside of records.
  void restore(std::size_t unit) {
    for (const Tiles& tiles : in_turn(unit)) {
      const Piece kept = kept_apart(tiles);
      keep_parameters(tiles, block_of(tiles).parameters.part(0, kept.bytes), kept);
      records_.leave();
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
  // What tiles keep in one tier: the state, and on the host the parameters too.
  struct Block {
    Piece parameters{};
    Piece state{};
    bool on_device = false;
  };
  // What tiles are updated from, and the buffers that bring it to the host.
  struct Source {
    Piece values{};
    Tier tier = Tier::device;
    Ring& on_its_way;
  };
  // The block of tiles and what they are updated from, in the tier where they are updated.
  struct Visit {
    Block block{};
    Piece values{};
  };
  // A copy to the device that is due.
  struct Upload {
    Tiles tiles{};
    Piece from{};
    Piece to{};
  };
  // An update by whole matrices that has begun, and its memory.
  struct Begun {
    Piece directions{};  // directions of the unit's tiles, on the device
    Piece matrices{};
    std::vector<Block> blocks{};  // of the unit's tiles, in_turn()
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

  void make_direction(const Tiles& tiles, const Block& home, const Piece& direction) {
    const Visit visit = begin_visit(tiles, home, gradient_of(tiles));
    const bool passes = !visit.block.on_device && !context_.input.host_is_device;
    const Piece to = passes ? context_.slots.rings.tile_directions.next(direction.bytes) : direction;
    add_update(OpKind::momentum, tiles, visit, to);
    if (passes) upload_later(tiles, to, direction);
    end_visit(tiles, home, visit.block);
  }

  // Parameters are updated in their block. If the block has none, they are updated where memory keeps them, or in a copy on the
  // host that is on its way to another tier.
  void update_tiles(const Tiles& tiles, const Block& home, const Source& from) {
    const Visit visit = begin_visit(tiles, home, from);
    const Piece kept = kept_apart(tiles);
    Piece parameters = kept;
    if (visit.block.parameters.exists()) {
      parameters = visit.block.parameters.part(0, range_of(tiles).count * context_.width(tiles.unit));
    } else if (!visit.block.on_device) {
      const Tier tier = context_.residence(tiles.unit).parameters;
      parameters = on_host(tiles, {kept, tier, context_.slots.rings.tile_parameters});
    }
    add_update(OpKind::update, tiles, visit, parameters);
    if (kept.exists() && kept != parameters) keep_parameters(tiles, parameters, kept);
    end_visit(tiles, home, visit.block);
  }

  void keep_parameters(const Tiles& tiles, const Piece& parameters, const Piece& kept) {
    if (context_.residence(tiles.unit).parameters == Tier::device) {
      upload_later(tiles, parameters, kept);
    } else {
      move(OpKind::keep, tiles, parameters, kept);
    }
  }

  void add_update(OpKind kind, const Tiles& tiles, const Visit& visit, const Piece& to) {
    context_.builder.add({.kind = kind,
                          .lane = visit.block.on_device ? Lane::update : Lane::host,
                          .unit = tiles.unit,
                          .tile = tiles.first,
                          .tiles = tiles.count,
                          .from = visit.values,
                          .to = to,
                          .state = visit.block.state},
                         context_.agreement);
  }

  // Brings what tiles are updated from to their block, or both to the device.
  Visit begin_visit(const Tiles& tiles, const Block& home, const Source& from) {
    if (home.on_device) return {home, from.values};
    if (!context_.slots.is_visitor(tiles.unit, tiles.first)) {
      end_upload();
      return {home, on_host(tiles, from)};
    }
    const std::size_t more = from.tier == Tier::device ? 0 : from.values.bytes;
    Visit visit{{home.parameters, home.state, true}, from.values};
    const std::size_t bytes = home.parameters.bytes + home.state.bytes + more;
    if (bytes == 0) return visit;  // a rule without state updates parameters that the device keeps
    const Piece memory = context_.slots.rings.visitors.next(bytes);
    std::size_t begin = 0;
    const auto bring = [&](Piece& piece) {
      const Piece to = memory.part(begin, piece.bytes);
      begin += piece.bytes;
      move(OpKind::upload, tiles, std::exchange(piece, to), to);
    };
    if (home.parameters.exists()) bring(visit.block.parameters);
    if (home.state.exists()) bring(visit.block.state);
    if (more > 0) bring(visit.values);
    return visit;
  }

  void end_visit(const Tiles& tiles, const Block& home, const Block& block) {
    if (block.parameters != home.parameters) move(OpKind::download, tiles, block.parameters, home.parameters);
    if (block.state != home.state) move(OpKind::download, tiles, block.state, home.state);
  }

  // Uploads what an update on the host has made when the next one begins there, or at the end of the unit: the visitors until then
  // need not wait for the host.
  void upload_later(const Tiles& tiles, const Piece& from, const Piece& to) {
    upload_ = {tiles, from, to};
    const bool is_record = tier_of(tiles) == Tier::nvme;  // its memory is needed again
    if (is_record || context_.slots.visitors(tiles.unit) == 0) end_upload();
  }

  void end_upload() {
    if (upload_) move(OpKind::upload, upload_->tiles, upload_->from, upload_->to);
    upload_.reset();
  }

  // The tiles of a unit in the order in which their updates begin. Neighbours whose state lies in one tier are updated together.
  // Visitors and others take turns, so that each have come as far.
  std::vector<Tiles> in_turn(std::size_t unit) const {
    std::array<std::vector<Tiles>, 2> kinds;  // visitors, and others
    for (std::size_t tile = 0; tile < tiles(unit);) {
      const std::size_t end = context_.slots.end_of_update(unit, tile);
      kinds[context_.slots.is_visitor(unit, tile) ? 0 : 1].push_back({unit, tile, end - tile});
      tile = end;
    }
    const auto& [visitors, others] = kinds;
    const std::size_t tiles_of_others = tiles(unit) - visitors.size();
    std::vector<Tiles> order;
    std::size_t other_tiles = 0;
    for (std::size_t visitor = 0, other = 0; visitor + other < visitors.size() + others.size();) {
      const bool is_others_turn = other_tiles * visitors.size() <= visitor * tiles_of_others;
      const bool takes_other = visitor == visitors.size() || (other < others.size() && is_others_turn);
      order.push_back(takes_other ? others[other++] : visitors[visitor++]);
      if (takes_other) other_tiles += order.back().count;
    }
    return order;
  }

  Block block_of(const Tiles& tiles) {  // reads a record
    const UnitSlots& slots = context_.slots.of(tiles.unit);
    if (tier_of(tiles) == Tier::nvme) {
      const BlockSizes sizes = context_.input.blocks.in_record(tiles.unit);
      const Piece block = records_.next().part(context_.input.blocks.records().payload, sizes.bytes());
      const Piece parameters = sizes.parameter == 0 ? Piece{} : block.part(0, sizes.parameter);
      return {parameters, block.part(sizes.parameter, sizes.state)};
    }
    const bool on_device = tier_of(tiles) == Tier::device;
    return {on_device ? Piece{} : together(slots.host_parameters, tiles), together(slots.state, tiles), on_device};
  }

  // The memory of neighbours.
  static Piece together(const std::vector<Piece>& pieces, const Tiles& tiles) {
    Piece piece = pieces[tiles.first];
    if (piece.exists()) piece.bytes = pieces[tiles.first + tiles.count - 1].end() - piece.begin;
    return piece;
  }

  Source gradient_of(const Tiles& tiles) const {
    const auto [first, count] = range_of(tiles);
    const std::size_t width = context_.width_of_sums(tiles.unit);
    return {gradients_.summed(tiles.unit).part(first * width, count * width), context_.residence(tiles.unit).gradients,
            context_.slots.rings.tile_gradients};
  }

  Piece direction_of(const Tiles& tiles, const Piece& directions) const {
    const auto [first, count] = range_of(tiles);
    return directions.part(first * byte_size(DType::bf16), count * byte_size(DType::bf16));
  }

  Piece on_host(const Tiles& tiles, const Source& source) const {
    if (source.tier != Tier::device || context_.input.host_is_device) return source.values;
    const Piece copy = source.on_its_way.next(source.values.bytes);
    move(OpKind::download, tiles, source.values, copy);
    return copy;
  }

  // Returns the parameters of tiles if memory keeps them outside the block: alone, or as copies.
  Piece kept_apart(const Tiles& tiles) const {
    const Tier tier = context_.residence(tiles.unit).parameters;
    if (tier == Tier::device) return parameters_.kept_range(tiles.unit, range_of(tiles));
    if (tier == Tier::nvme || tier_of(tiles) != Tier::nvme) return {};
    const Piece& copy = context_.slots.of(tiles.unit).host_parameters[tiles.first];
    return copy.part(0, range_of(tiles).count * context_.width(tiles.unit));
  }

  void move(OpKind kind, const Tiles& tiles, const Piece& from, const Piece& to) const {
    context_.copy(kind, Phase::step, tiles, from, to);
  }

  Tier tier_of(const Tiles& tiles) const { return context_.residence(tiles.unit).state[tiles.first]; }
  Range range_of(const Tiles& tiles) const {  // of this rank's shard
    const std::vector<Range>& all = context_.layout(tiles.unit).tiles;
    const std::size_t first = all[tiles.first].first;
    return {first, all[tiles.first + tiles.count - 1].end() - first};
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
