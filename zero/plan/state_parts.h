// The tensors' parts in a tile of a rank.
#pragma once

#include <ballast/local_state.h>

#include <vector>

#include "zero/plan/compile.h"

namespace ballast {

// A part, and the element of the tile at which it begins. Its memory is that of the tile, if the tile has some.
struct PartOfTile {
  StatePart part{};
  std::size_t in_tile = 0;
};

// Returns them in order. Padding belongs to no part.
std::vector<PartOfTile> parts_in(const CompiledPlan& plan, const LocalTile& tile);

}  // namespace ballast
