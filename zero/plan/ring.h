// Buffers of one kind that operations use in turn.
#pragma once

#include "zero/plan/program.h"

namespace ballast {

// Slots of equal size; or as many parts of one slot.
class Ring {
 public:
  Ring() = default;
  Ring(const Piece& first, std::size_t slots, bool in_one_slot = false)
      : first_(first), slots_(slots), in_one_slot_(in_one_slot) {}

  std::size_t slots() const { return slots_; }
  Piece at(std::size_t turn) const {
    const std::size_t index = turn % slots_;
    return in_one_slot_ ? Piece{first_.slot, index * first_.bytes, first_.bytes}
                        : Piece{first_.slot + index, 0, first_.bytes};
  }
  Piece next(std::size_t bytes) { return next().part(0, bytes); }
  Piece next() { return at(turn_++); }
  void restart() { turn_ = 0; }

 private:
  Piece first_{};
  std::size_t slots_ = 0;
  bool in_one_slot_ = false;
  std::size_t turn_ = 0;
};

}  // namespace ballast
