// The optimizer step over a part of a shard. One pass reads the gradient and rewrites master, moments and parameter.
#pragma once

#include <ballast/state_format.h>

#include <cstdint>
#include <span>

#include "kernels/rules/rule.h"

namespace ballast::kernels {

// The step of one parameter group.
struct GroupStep {
  Rule rule;
  float gradient_factor = 1.0f;  // unscaling, averaging and clipping in one; negative to maximise
};

// A stretch of the tile that belongs to one parameter group. Runs come in order and do not overlap; elements outside
// all of them stay as they are.
struct Run {
  std::size_t begin = 0;
  std::size_t count = 0;
  std::size_t group = 0;
};

// The part from `first` on, `count` elements long. If has_scales(tile.format), `first` is a multiple of the group size.
TileMemory part(const TileMemory& tile, std::size_t first, std::size_t count);

// Throws a UsageError for wrong arguments. Every backend's update calls it first.
void check_update(const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups);

}  // namespace ballast::kernels
