// The optimizer step over a part of a shard. One pass reads the gradient and rewrites master, moments and parameter.
#pragma once

#include <ballast/state_format.h>

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/rule_math.h"

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
  // The model's number of its tensor, and where that begins in the unit: random bits depend on both.
  std::uint64_t tensor = 0;
  std::uint64_t tensor_begin = 0;

  bool operator==(const Run&) const = default;
};

// A tile and the runs in it.
struct TileUpdate {
  TileMemory tile;
  std::vector<Run> runs;
};

// Where the random bits of an array of elements come from.
struct RoundingPlace {
  std::uint64_t stream = 0;
  std::uint64_t first_index = 0;  // the first element's index in its unit
};

// Returns the index of the run's first element.
constexpr std::uint64_t index_in_tensor(const Run& run, const RoundingPlace& place) {
  return place.first_index + run.begin - run.tensor_begin;
}

// The part of a run from its element `first` on, `count` elements long.
inline Run part(const Run& run, std::size_t first, std::size_t count) {
  return {run.begin + first, count, run.group, run.tensor, run.tensor_begin};
}

// Calls visit(array, bits) for each array of a tile that has a value for each element, with the bits of a value.
template <class Visit>
constexpr void each_array(TileMemory& tile, const Visit& visit) {
  visit(tile.gradient, 8 * byte_size(tile.gradient_dtype));
  visit(tile.parameter, 8 * byte_size(tile.parameter_dtype));
  visit(tile.master, 8 * master_bytes(tile.format));
  visit(tile.momentum, moment_bits(tile.format));
  visit(tile.variance, moment_bits(tile.format));
}

// The part from `first` on, `count` elements long. Throws B1004 if groups have scales and `first` is no multiple of the group
// size.
TileMemory part(const TileMemory& tile, std::size_t first, std::size_t count);

}  // namespace ballast::kernels
