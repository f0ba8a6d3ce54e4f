// The records of a step on their way through memory.
#pragma once

#include <algorithm>
#include <compare>
#include <map>

#include "zero/plan/builder.h"

namespace ballast {

struct TileName {
  std::size_t unit = 0;
  std::size_t tile = 0;

  auto operator<=>(const TileName&) const = default;  // NOLINT(modernize-use-nullptr): a false alarm
};

// The records of a step on their way through memory: read ahead, updated where they lie, written back in the same
// order.
class RecordStream {
 public:
  // `units`: as the program updates them. The first of their tiles on drives stay in memory, as many as slots are kept for.
  RecordStream(CompileContext& context, const std::vector<std::size_t>& units) : context_(context) {
    follow(units);
    any_ = !order_.empty();
    for (std::size_t i = 0; i < context_.slots.kept().size(); ++i) {
      kept_[order_[i]] = context_.slots.kept()[i];
    }
  }

  bool any() const { return any_; }

  void read_kept() {  // called before the first step, and before updates are made again
    for (std::size_t i = 0; i < context_.slots.kept().size(); ++i) {
      read(order_[i], context_.slots.kept()[i]);
    }
  }

  void begin_step() {
    staging_.clear();
    tiles_read_ = 0;
    tiles_taken_ = 0;
    tiles_updated_ = 0;
    staged_ = 0;
  }

  void follow(const std::vector<std::size_t>& units) {  // another order in this step
    order_.clear();
    for (const std::size_t unit : units) {
      const std::vector<Tier>& tiers = context_.residence(unit).state;
      for (std::size_t tile = 0; tile < tiers.size(); ++tile) {
        if (tiers[tile] == Tier::nvme) order_.push_back({unit, tile});
      }
    }
  }

  Piece next() {  // where the next tile's record lies: reads it, and some ahead
    read_ahead();
    return staging_.at(tiles_taken_++);
  }

  // Writes back the oldest record that next() gave.
  void write_back() {
    const TileName& name = order_[tiles_updated_];
    written_[name] = context_.builder.add({.kind = OpKind::write,
                                           .lane = Lane::disk,
                                           .unit = name.unit,
                                           .tile = name.tile,
                                           .from = staging_[tiles_updated_]},
                                          context_.agreement);
    leave();
  }

  void leave() {  // leaves the oldest record that next() gave as it is
    if (!kept_.contains(order_[tiles_updated_])) --staged_;
    staging_.erase(tiles_updated_++);
  }

  // Returns its newest write, in this step or the last, if there is one.
  std::vector<std::size_t> written(const TileName& name) const {
    const auto found = written_.find(name);
    return found == written_.end() ? std::vector<std::size_t>{} : std::vector{found->second};
  }

 private:
  void read(const TileName& name, const Piece& to) {
    context_.builder.add({.kind = OpKind::read, .lane = Lane::disk, .unit = name.unit, .tile = name.tile, .to = to});
  }

  // Half of the slots are read into while the others are updated and written, so a read seldom waits for a write.
  void read_ahead() {
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

  CompileContext& context_;
  std::vector<TileName> order_;  // the tiles on drives
  bool any_ = false;
  std::map<TileName, Piece> kept_;        // records that stay in memory
  std::map<std::size_t, Piece> staging_;  // the key is the index in order_
  std::map<TileName, std::size_t> written_;
  std::size_t tiles_read_ = 0;
  std::size_t tiles_taken_ = 0;  // tiles that next() took
  std::size_t tiles_updated_ = 0;
  std::size_t staged_ = 0;  // records in the staging slots
};

}  // namespace ballast
