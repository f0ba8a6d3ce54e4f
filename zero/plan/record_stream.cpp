#include "zero/plan/record_stream.h"

#include <algorithm>

namespace ballast {

std::vector<TileName> tiles_on_drive(const StepSlots& slots, const std::vector<std::size_t>& units) {
  std::vector<TileName> tiles;
  for (const std::size_t unit : units) {
    const std::vector<Tier>& tiers = slots.residence(unit).state;
    for (std::size_t tile = 0; tile < tiers.size(); ++tile) {
      if (tiers[tile] == Tier::nvme) tiles.push_back({unit, tile});
    }
  }
  return tiles;
}

RecordStream::RecordStream(StepSlots& slots, Builder& builder, std::vector<TileName> order)
    : slots_(slots), builder_(builder), order_(std::move(order)), any_(!order_.empty()) {
  for (std::size_t i = 0; i < slots_.kept().size(); ++i) {
    kept_[order_[i]] = slots_.kept()[i];
  }
}

void RecordStream::read_kept() {
  for (std::size_t i = 0; i < slots_.kept().size(); ++i) {
    const TileName& name = order_[i];
    builder_.add(
        {.kind = OpKind::read, .lane = Lane::disk, .unit = name.unit, .tile = name.tile, .to = slots_.kept()[i]});
  }
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
  const std::size_t ahead = slots_.rings.staging.slots() / 2;
  for (; tiles_read_ < std::min(tiles_taken_ + ahead + 1, order_.size()); ++tiles_read_) {
    const TileName& name = order_[tiles_read_];
    if (const auto kept = kept_.find(name); kept != kept_.end()) {
      staging_[tiles_read_] = kept->second;
      continue;
    }
    if (staged_ == slots_.rings.staging.slots()) return;  // the others are in use until they are written back
    ++staged_;
    const Piece record = slots_.rings.staging.next();
    builder_.add({.kind = OpKind::read, .lane = Lane::disk, .unit = name.unit, .tile = name.tile, .to = record});
    staging_[tiles_read_] = record;
  }
}

void RecordStream::write_back(const std::vector<std::size_t>& after) {
  const TileName& name = order_[tiles_updated_];
  written_[name] = builder_.add({.kind = OpKind::write,
                                 .lane = Lane::disk,
                                 .unit = name.unit,
                                 .tile = name.tile,
                                 .from = staging_[tiles_updated_]},
                                after);
  if (!kept_.contains(name)) --staged_;
  staging_.erase(tiles_updated_++);
}

std::size_t RecordStream::written(const TileName& name) const {
  const auto found = written_.find(name);
  return found == written_.end() ? none : found->second;
}

}  // namespace ballast
