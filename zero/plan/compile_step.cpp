// The step: one decision for all ranks, updates in the order of the next forward, and its first gathers.
#include <algorithm>

#include "zero/plan/compiler.h"

namespace ballast {

void Compiler::step() {
  gathered_.clear();  // whatever is gathered now is old when the updates are done
  const std::size_t agreement = builder_.add(
      {.kind = OpKind::agree, .lane = Lane::reduce, .to = slots_.norm(Tier::device), .state = slots_.norm(Tier::host)},
      waits_for_last_commit());
  if (!in_.schedule.update_in_backward) agreed_ = agreement;
  for (const std::size_t unit : uses_.by_first_visit()) {
    if (!current_[unit]) {
      uses_.backward_visits(unit) > 0 ? update(unit) : carry_over(unit);
      gather_whole(unit);
    }
    hoist();
  }
  if (has_records_) committed_ = builder_.add({.kind = OpKind::commit, .lane = Lane::disk}, {agreement});
}

void Compiler::update(std::size_t unit) {
  gathered_.drop(unit);
  current_[unit] = true;
  for (std::size_t tile = 0; tile < in_.layout.units[unit].tiles.size(); ++tile) {
    update_tile(unit, tile);
  }
  if (in_.schedule.update_in_backward) gather_whole(unit);
}

void Compiler::update_tile(std::size_t unit, std::size_t tile) {
  switch (slots_.residence(unit).state[tile]) {
    case Tier::device: {
      const auto [first, count] = in_.layout.units[unit].tiles[tile];
      const Piece kept = kept_shard(unit, in_.layout.units[unit].trained);
      builder_.add({.kind = OpKind::update,
                    .lane = Lane::update,
                    .unit = unit,
                    .tile = tile,
                    .from = summed_[unit].part(first * sizeof(float), count * sizeof(float)),
                    .to = kept.part(first * width(unit), count * width(unit)),
                    .state = slots_.of(unit).state[tile]},
                   waits_for_agreement());
      return;
    }
    case Tier::host: return update_on_host(unit, tile, slots_.of(unit).blocks[tile], in_.blocks.of(unit));
    case Tier::nvme: {
      read_ahead();
      const Piece record = staging_[tiles_updated_];
      const BlockSizes sizes = in_.blocks.in_record(unit);
      update_on_host(unit, tile, record.part(in_.blocks.records().payload, sizes.bytes()), sizes);
      write_back(record);
      return;
    }
  }
}

// A tile's parameter, where it is kept in memory apart from its state, or beside a copy there.
Piece Compiler::kept_beside_block(std::size_t unit, std::size_t tile) const {
  const auto [first, count] = in_.layout.units[unit].tiles[tile];
  switch (slots_.residence(unit).parameters) {
    case Tier::device:
      return kept_shard(unit, in_.layout.units[unit].trained).part(first * width(unit), count * width(unit));
    case Tier::host: {
      const Piece& copy = slots_.of(unit).copies[tile];
      return copy.exists() ? copy.part(0, count * width(unit)) : Piece{};
    }
    case Tier::nvme: return {};
  }
  return {};
}

// The parameter is updated in its block; where that has none, as it lies in the host's memory, or else on its way through.
void Compiler::update_on_host(std::size_t unit, std::size_t tile, const Piece& block, const BlockSizes& sizes) {
  const auto [first, count] = in_.layout.units[unit].tiles[tile];
  const UnitResidence& at = slots_.residence(unit);
  const auto move = [&](OpKind kind, Lane lane, const Piece& from, const Piece& to) {
    builder_.add({.kind = kind, .lane = lane, .unit = unit, .tile = tile, .from = from, .to = to});
  };
  const auto on_host = [&](const Piece& piece, Tier tier, Ring& on_its_way) {
    if (tier != Tier::device || in_.host_is_device) return piece;
    const Piece copy = on_its_way.next(piece.bytes);
    move(OpKind::download, Lane::download, piece, copy);
    return copy;
  };
  const Piece summed = summed_[unit].part(first * sizeof(float), count * sizeof(float));
  const Piece gradient = on_host(summed, at.gradients, slots_.tile_gradients);
  const Piece kept = kept_beside_block(unit, tile);
  const Piece parameter =
      sizes.parameter > 0 ? block.part(0, count * width(unit)) : on_host(kept, at.parameters, slots_.tile_parameters);
  builder_.add({.kind = OpKind::update,
                .lane = Lane::host,
                .unit = unit,
                .tile = tile,
                .from = gradient,
                .to = parameter,
                .state = block.part(sizes.parameter, sizes.state)},
               waits_for_agreement());
  if (!kept.exists() || kept == parameter) return;
  if (at.parameters == Tier::device) {
    move(OpKind::upload, Lane::upload, parameter, kept);
  } else {
    move(OpKind::keep, Lane::host, parameter, kept);
  }
}

std::vector<std::size_t> Compiler::waits_for_agreement() const {
  return agreed_ == none ? std::vector<std::size_t>{} : std::vector<std::size_t>{agreed_};
}

// A unit without gradients stays as it is. Its records have to be in the next generation all the same.
void Compiler::carry_over(std::size_t unit) {
  current_[unit] = true;
  for (const Tier tier : slots_.residence(unit).state) {
    if (tier != Tier::nvme) continue;
    read_ahead();
    write_back(staging_[tiles_updated_]);
  }
}

// Half of the slots are read into while the others are updated and written: so a read seldom waits for a write.
void Compiler::read_ahead() {
  const std::size_t ahead = slots_.staging.slots() / 2;
  for (; tiles_read_ < std::min(tiles_updated_ + ahead + 1, on_drive_.size()); ++tiles_read_) {
    const TileName& name = on_drive_[tiles_read_];
    if (const auto kept = kept_.find(name); kept != kept_.end()) {
      staging_[tiles_read_] = kept->second;
      continue;
    }
    const Piece record = slots_.staging.next();
    builder_.add({.kind = OpKind::read, .lane = Lane::disk, .unit = name.unit, .tile = name.tile, .to = record});
    staging_[tiles_read_] = record;
  }
}

void Compiler::write_back(const Piece& record) {
  const TileName& name = on_drive_[tiles_updated_];
  written_[name] =
      builder_.add({.kind = OpKind::write, .lane = Lane::disk, .unit = name.unit, .tile = name.tile, .from = record},
                   waits_for_agreement());
  staging_.erase(tiles_updated_++);
}

// Where parameters are kept whole, all ranks need all of them again. After a round that has left the program, the entry
// does this.
void Compiler::gather_whole(std::size_t unit) {
  if (departed_) return;
  const Section& trained = in_.layout.units[unit].trained;
  if (slots_.comes_and_goes(unit) || trained.shard == 0 || trained.shards == 1) return;
  builder_.add({.kind = OpKind::gather,
                .lane = Lane::gather,
                .unit = unit,
                .from = own_shard(unit, trained),
                .to = section(unit, trained)});
}

// The next step's first gathers, of units whose parameters are its own already.
void Compiler::hoist() {
  if (departed_) return;  // the entry does it
  for (; hoisted_ < std::min(in_.schedule.prefetch + 1, trace_.size()); ++hoisted_) {
    const std::size_t unit = trace_[hoisted_].unit;
    if (!current_[unit] || !bring(unit, 0, hoisted_)) return;
  }
}

}  // namespace ballast
