// What a rank keeps of a tile between steps, and how callers look at it.
#pragma once

#include <functional>

#include "kernels/update.h"
#include "zero/plan/layout.h"

namespace ballast {

// Parameter, master and moments of one tile of this rank's shard, in host memory. Frozen parameters are not cut into tiles:
// they come in stretches, with the parameter alone.
struct LocalTile {
  std::size_t unit = 0;
  Range range{};  // of the unit's elements
  kernels::UpdateTile memory{};
  bool frozen = false;
};
using TileVisitor = std::function<void(const LocalTile& tile)>;
using TileFilter = std::function<bool(const LocalTile& tile)>;  // sees tiles without their memory

}  // namespace ballast
