// How units are cut: padded, into one contiguous shard per rank of the shard group, each shard into tiles. A pure value,
// the same on every rank.
#pragma once

#include <vector>

#include "kernels/update.h"
#include "zero/model.h"

namespace ballast {

struct Range {
  std::size_t first = 0;
  std::size_t count = 0;
};

struct UnitLayout {
  std::vector<std::size_t> tensor_begin;  // multiples of the group size, so that no group has two owners
  std::size_t elements = 0;               // with padding: shards * shard
  std::size_t shard = 0;
  std::vector<Range> tiles;  // of a shard, relative to its beginning
};

struct Layout {
  std::size_t shards = 1;
  std::size_t tile_elements = 0;
  std::vector<UnitLayout> units;
};

Layout make_layout(const Model& model, std::size_t shards, std::size_t tile_elements);

// Which parameter groups lie in a range of a unit, as runs relative to its beginning. Padding is in none.
std::vector<kernels::Run> runs_in(const Unit& unit, const UnitLayout& layout, Range range);

}  // namespace ballast
