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

}  // namespace ballast
