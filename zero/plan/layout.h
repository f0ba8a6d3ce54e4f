// How units are cut: padded, into one contiguous shard per rank of the shard group, each shard into tiles; and the tier of each
// tile. A pure value, the same on every rank.
#pragma once

#include <ballast/model.h>
#include <ballast/placement.h>

#include <limits>
#include <span>
#include <vector>

#include "kernels/update.h"

namespace ballast {

inline constexpr std::size_t none = std::numeric_limits<std::size_t>::max();

Range intersection(const Range& a, const Range& b);  // a count of 0 if they do not overlap

// A stretch of a unit that is cut into one shard for each rank.
struct Section {
  std::size_t first = 0;  // first element in the unit
  std::size_t shard = 0;
  std::size_t shards = 1;

  std::size_t count() const { return shard * shards; }
  Range all() const { return {first, count()}; }
  Range of_rank(std::size_t rank) const { return {first + rank * shard, shard}; }          // a range of the unit
  Section joined(std::size_t each) const { return {first, shard * each, shards / each}; }  // neighbouring shards
};

// Trained tensors come first, frozen ones after them, so that a rank keeps only the parameters of those.
struct UnitLayout {
  std::vector<std::size_t> tensor_begin;     // multiples of the group size, so that no group has two owners
  std::vector<std::uint64_t> tensor_number;  // each tensor's number in the model
  Section trained;
  Section frozen;
  // Elements of the unit's largest tile, leaving out the device's; 0: it has no other tile.
  std::size_t tile_elements = 0;
  // Elements of the first tile, if it is all of the shard whose state is on the device.
  std::size_t device_elements = 0;
  std::vector<Range> tiles;   // tiles of a trained shard, relative to its beginning
  std::vector<Tier> tiers{};  // tiers of the tiles' state, if they were cut for it; else reside() deals them out
  std::vector<Range> frozen_tiles{};  // tiles of a frozen shard, likewise: the grain of reads, where it is on a drive

  std::size_t elements() const { return trained.count() + frozen.count(); }
  // Frozen tiles are numbered after the trained ones.
  bool is_frozen(std::size_t tile) const { return tile >= tiles.size(); }
  Range of_rank(std::size_t rank, std::size_t tile) const {  // a range of the unit
    const auto [first, count] = is_frozen(tile) ? frozen_tiles[tile - tiles.size()] : tiles[tile];
    return {(is_frozen(tile) ? frozen : trained).of_rank(rank).first + first, count};
  }
};

// The number of the shard of state that a rank keeps. Ranks with the same position in their groups have neighbouring shards:
// together they keep what a rank keeps of parameters with several copies.
std::size_t shard_of(const Placement& placement, std::size_t rank);

struct Layout {
  std::size_t shards = 1;
  std::vector<UnitLayout> units;
};

// Most elements in a tile. A frozen tile of another format has as many bytes as one of bf16.
struct TileSizes {
  std::size_t trained = 0;
  std::size_t frozen = 0;
};

// Tiles are of equal size in a unit.
Layout make_layout(const Model& model, std::size_t shards, const TileSizes& sizes);
inline Layout make_layout(const Model& model, std::size_t shards, std::size_t tile_elements) {
  return make_layout(model, shards, TileSizes{tile_elements, tile_elements});
}

// Cuts the tiles of a placement. On the device a tile is all that a rank keeps of a unit there, so that one kernel updates it:
// kernels are what an update costs there. Elsewhere a tile is the grain of copies and of the drive. `tile_elements`: at most so
// many in each tile, in every tier; 0: these sizes.
Layout lay_out(const Model& model, const Placement& placement, std::size_t tile_elements);

// Elements of a tile outside the device, where the caller asks for no size. It depends on the model and the number of
// shards alone, so a training keeps its tiles when its tiers change.
std::size_t automatic_tile(const Model& model, std::size_t shards, Section UnitLayout::*of = &UnitLayout::trained);

// The tiers of one unit and its tiles. Parameters are no farther than the state that makes them, and gradients wait
// where the update is made, or nearer. The fractions of a placement yield to this.
struct UnitResidence {
  Tier parameters = Tier::device;
  Tier gradients = Tier::device;
  std::vector<Tier> state{};  // one for each tile
};

std::vector<UnitResidence> reside(const Placement& placement, const Layout& layout);

// Divides a stretch of a shard into tiles of `tile_elements` and a last one of what is left.
std::vector<Range> cut(const Range& range, std::size_t tile_elements);

// The parameter groups in a range of a unit, as runs relative to its beginning. Padding is in none. `groups` replaces those of
// the unit's tensors; a tensor whose group is `none` is in no run.
std::vector<kernels::Run> runs_in(const Unit& unit, const UnitLayout& layout, Range range,
                                  std::span<const std::size_t> groups = {});

// A part of a tensor, and its position.
struct TensorPart {
  std::size_t tensor = 0;
  Range range{};             // a range of the tensor's elements
  std::size_t rank = 0;      // whose shard has it
  std::size_t in_shard = 0;  // where it begins in the rank's shard: of the trained section, or of the frozen one
};

// The ranks that have the parts of a tensor, in order.
std::vector<TensorPart> owners_of(const Unit& unit, const UnitLayout& layout, std::size_t tensor, Range range);

// The parts of tensors in a range of a rank's shard of a section, in order. Padding is in none.
std::vector<TensorPart> tensors_in(const Unit& unit, const UnitLayout& layout, const Section& section, std::size_t rank,
                                   Range range);

// The ranges of a rank's shard of the trained section that count in the norm of all gradients: one range, if all
// tensors do.
std::vector<Range> counted_in(const Unit& unit, const UnitLayout& layout, std::size_t rank);

}  // namespace ballast
