// The records of a step on their way through memory: read ahead, updated where they lie, written back in the same
// order.
#pragma once

#include <map>
#include <tuple>

#include "zero/plan/builder.h"
#include "zero/plan/step_slots.h"

namespace ballast {

struct TileName {
  std::size_t unit = 0;
  std::size_t tile = 0;
  bool operator<(const TileName& other) const { return std::tie(unit, tile) < std::tie(other.unit, other.tile); }
};

// The tiles of these units whose state lies on a drive, in the order of the units.
std::vector<TileName> tiles_on_drive(const StepSlots& slots, const std::vector<std::size_t>& units);

class RecordStream {
 public:
  // `order`: the tiles as the program updates them. The first of them stay in memory, as many as slots are kept for.
  RecordStream(StepSlots& slots, Builder& builder, std::vector<TileName> order);

  bool any() const { return any_; }
  void read_kept();  // before the first step
  void begin_step();
  void follow(std::vector<TileName> order) { order_ = std::move(order); }  // another order in this step

  Piece next();  // where the next tile's record lies: reads it, and some ahead
  void write_back(const std::vector<std::size_t>& after);  // the oldest record that next() gave
  std::size_t written(const TileName& name) const;  // operation: its newest write, in this step or the last; or none

 private:
  void read_ahead();

  StepSlots& slots_;
  Builder& builder_;
  std::vector<TileName> order_;
  bool any_;
  std::map<TileName, Piece> kept_;        // records that stay in memory
  std::map<std::size_t, Piece> staging_;  // by index in order_
  std::map<TileName, std::size_t> written_;
  std::size_t tiles_read_ = 0;
  std::size_t tiles_taken_ = 0;  // by next()
  std::size_t tiles_updated_ = 0;
  std::size_t staged_ = 0;  // records in the staging slots
};

}  // namespace ballast
