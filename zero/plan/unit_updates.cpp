#include <algorithm>

#include "zero/plan/compiler_parts.h"

namespace ballast {

RecordStream::RecordStream(CompileContext& context, const std::vector<std::size_t>& units) : context_(context) {
  follow(units);
  any_ = !order_.empty();
  for (std::size_t i = 0; i < context_.slots.kept().size(); ++i) {
    kept_[order_[i]] = context_.slots.kept()[i];
  }
}

void RecordStream::follow(const std::vector<std::size_t>& units) {
  order_.clear();
  for (const std::size_t unit : units) {
    const std::vector<Tier>& tiers = context_.residence(unit).state;
    for (std::size_t tile = 0; tile < tiers.size(); ++tile) {
      if (tiers[tile] == Tier::nvme) order_.push_back({unit, tile});
    }
  }
}

void RecordStream::read_kept() {
  for (std::size_t i = 0; i < context_.slots.kept().size(); ++i) {
    read(order_[i], context_.slots.kept()[i]);
  }
}

void RecordStream::read(const TileName& name, const Piece& to) {
  context_.builder.add({.kind = OpKind::read, .lane = Lane::disk, .unit = name.unit, .tile = name.tile, .to = to});
}

void RecordStream::begin_step() {
  staging_.clear();
  tiles_read_ = 0;
  tiles_taken_ = 0;
  tiles_updated_ = 0;
  staged_ = 0;
}

Piece RecordStream::next() {
  read_ahead();
  return staging_.at(tiles_taken_++);
}

// Half of the slots are read into while the others are updated and written, so a read seldom waits for a write.
void RecordStream::read_ahead() {
  const std::size_t ahead = context_.slots.rings.staging.slots() / 2;
  for (; tiles_read_ < std::min(tiles_taken_ + ahead + 1, order_.size()); ++tiles_read_) {
    const TileName& name = order_[tiles_read_];
    if (const auto kept = kept_.find(name); kept != kept_.end()) {
      staging_[tiles_read_] = kept->second;
      continue;
    }
    if (staged_ == context_.slots.rings.staging.slots()) return;  // the others are in use until they are written back
    ++staged_;
    const Piece record = context_.slots.rings.staging.next();
    read(name, record);
    staging_[tiles_read_] = record;
  }
}

void RecordStream::write_back() {
  const TileName& name = order_[tiles_updated_];
  written_[name] = context_.builder.add({.kind = OpKind::write,
                                         .lane = Lane::disk,
                                         .unit = name.unit,
                                         .tile = name.tile,
                                         .from = staging_[tiles_updated_]},
                                        context_.agreement);
  if (!kept_.contains(name)) --staged_;
  staging_.erase(tiles_updated_++);
}

std::vector<std::size_t> RecordStream::written(const TileName& name) const {
  const auto found = written_.find(name);
  return found == written_.end() ? std::vector<std::size_t>{} : std::vector{found->second};
}

void UnitUpdates::begin(std::size_t unit) {
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

void UnitUpdates::end(std::size_t unit) {
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

void UnitUpdates::orthogonalize(std::size_t unit, const Begun& update) {
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

void UnitUpdates::carry_over(std::size_t unit) {
  for (const Tier tier : context_.residence(unit).state) {
    if (tier != Tier::nvme) continue;
    records_.next();
    records_.write_back();
  }
}

UnitUpdates::Block UnitUpdates::block_of(const TileName& name) {
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

UnitUpdates::Source UnitUpdates::gradient_of(const TileName& name) const {
  const auto [first, count] = context_.layout(name.unit).tiles[name.tile];
  const std::size_t width = context_.width_of_sums(name.unit);
  return {gradients_.summed(name.unit).part(first * width, count * width), context_.residence(name.unit).gradients,
          context_.slots.rings.tile_gradients};
}

Piece UnitUpdates::direction_of(const TileName& name, const Piece& directions) const {
  const auto [first, count] = context_.layout(name.unit).tiles[name.tile];
  return directions.part(first * byte_size(DType::bf16), count * byte_size(DType::bf16));
}

void UnitUpdates::move(OpKind kind, Lane lane, const TileName& name, const Piece& from, const Piece& to) const {
  context_.builder.add({.kind = kind, .lane = lane, .unit = name.unit, .tile = name.tile, .from = from, .to = to});
}

Piece UnitUpdates::on_host(const TileName& name, const Source& source) const {
  if (source.tier != Tier::device || context_.input.host_is_device) return source.values;
  const Piece copy = source.on_its_way.next(source.values.bytes);
  move(OpKind::download, Lane::download, name, source.values, copy);
  return copy;
}

// The state is in the block, or on the device.
void UnitUpdates::make_direction(const TileName& name, const Block& block, const Piece& direction) {
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

void UnitUpdates::update_tile(const TileName& name, const Block& block, const Source& from) {
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

// Returns the tile's parameter if memory keeps it outside the block: alone, or as a copy.
Piece UnitUpdates::kept_apart(const TileName& name) const {
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

// The parameter is updated in its block. Where the block has none, it is updated where the host keeps it, or in a copy
// on its way through.
void UnitUpdates::update_on_host(const TileName& name, const Block& block, const Source& from) {
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

}  // namespace ballast
