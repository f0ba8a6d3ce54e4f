// The list of a program's slots while it grows.
#pragma once

#include "zero/plan/ring.h"

namespace ballast {

class SlotList {
 public:
  const std::vector<Slot>& all() const { return all_; }

  std::size_t add(SlotRole role, Tier tier, std::size_t bytes, std::string_view which = {});  // its index
  Ring add_ring(SlotRole role, Tier tier, std::size_t slots, std::size_t bytes);

  // All records in one slot of full huge pages, on the host.
  Ring add_records(SlotRole role, std::size_t records, std::size_t bytes);

  // Pieces of one slot for those of a unit's tiles whose state lies in one tier; none for the others.
  struct TilePieces {
    SlotRole role;
    Tier tier;        // of the slot
    Tier state_tier;  // of the tiles that get a piece
    std::size_t bytes = 0;
  };
  std::vector<Piece> add_pieces(const TilePieces& pieces, const std::vector<Tier>& state, std::string_view which);

 private:
  std::vector<Slot> all_;
};

}  // namespace ballast
