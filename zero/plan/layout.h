// How units are cut: padded, into one contiguous shard per rank of the shard group, each shard into tiles; and the tier and
// the form of each tile. Pure values, the same on every rank.
#pragma once

#include <ballast/model.h>
#include <ballast/placement.h>

#include <algorithm>
#include <limits>
#include <span>
#include <vector>

#include "kernels/update.h"
#include "offload/record_format.h"
#include "optim/state_layout.h"

namespace ballast {

inline constexpr std::size_t none = std::numeric_limits<std::size_t>::max();

Range intersection(const Range& a, const Range& b);  // a count of 0 if they do not overlap

// A stretch of a unit that is cut into one shard for each rank.
struct Section {
  std::size_t first = 0;  // first element in the unit
  std::size_t shard = 0;
  std::size_t shards = 1;
  std::size_t parts = 1;  // neighbouring ranks that have other values: see Unit::parts

  std::size_t count() const { return shard * shards; }
  Range all() const { return {first, count()}; }
  Range shard_range(std::size_t rank) const { return {first + rank / parts * shard, shard}; }     // a range of the unit
  Section joined(std::size_t each) const { return {first, shard * each, shards / each, parts}; }  // neighbouring shards
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
  Range tile_range(std::size_t rank, std::size_t tile) const {  // a range of the unit
    const auto [first, count] = is_frozen(tile) ? frozen_tiles[tile - tiles.size()] : tiles[tile];
    return {(is_frozen(tile) ? frozen : trained).shard_range(rank).first + first, count};
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
  std::size_t rank = 0;      // whose shard has it; the first one of those with other parts of the unit
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

// Bytes of a unit's largest tile outside the device; smaller ones take as much.
struct BlockSizes {
  std::size_t parameter = 0;
  std::size_t state = 0;

  std::size_t bytes() const { return parameter + state; }
};

struct BlockOptions {
  StateFormat format = StateFormat::split;
  optim::StateNames names{};
  bool full_records = false;  // records hold the parameter in any case
};

struct RecordSizes {
  std::size_t record = 0;
  std::size_t first_record = 0;  // enough for the parameter
  std::size_t frozen = 0;        // bytes of a tile of frozen parameters, which has nothing else
  std::size_t payload = 0;       // where it begins in a record
  std::size_t places = 1;        // places of each record on the drive: two where a run resumes from the last step

  std::size_t parameter_record() const { return std::max(first_record, frozen); }  // enough to read those of any tile
};

// Parameters that are not bf16 have fp32 state.
optim::StateKind state_kind(const Unit& unit, StateFormat format, const optim::StateNames& names);

// The form of a tile outside the device: its parameter, then its state. A record on a drive leaves the parameter out if
// memory keeps it, unless a run has to resume from its records alone.
class Blocks {
 public:
  Blocks(const Model& model, const Layout& layout, const Placement& placement, const BlockOptions& options);

  const BlockSizes& of(std::size_t unit) const { return sizes_[unit]; }
  BlockSizes in_record(std::size_t unit) const {
    return {full_records_ ? sizes_[unit].parameter : 0, sizes_[unit].state};
  }
  bool full_records() const { return full_records_; }
  // A tile of so many elements in the payload of its record; without the parameter, if memory keeps that.
  TileMemory recorded(std::size_t unit, std::size_t tile, std::size_t elements, std::byte* payload) const;
  const optim::StateLayout& state(std::size_t unit, std::size_t tile) const {
    return tile == 0 && first_is_of_device_[unit] ? on_device_[unit] : states_[unit];
  }
  // Counts a tile whose state is on the device.
  std::size_t state_bytes_on_device(std::size_t unit) const {
    return (first_is_of_device_[unit] ? on_device_ : states_)[unit].bytes();
  }
  const RecordSizes& records() const { return records_; }
  offload::RecordShape shape(std::size_t tiles) const;  // the name of a run is left out
  offload::RecordShape frozen_shape(std::size_t tiles) const;

 private:
  bool full_records_;
  std::vector<BlockSizes> sizes_;              // one for each unit
  std::vector<optim::StateLayout> states_;     // one for each unit
  std::vector<optim::StateLayout> on_device_;  // the tile that the device's part of a shard is, for each unit
  std::vector<bool> first_is_of_device_;       // one for each unit
  BlockSizes largest_;                         // the largest sizes in a record
  std::size_t largest_frozen_ = 0;             // bytes of a tile of frozen parameters
  RecordSizes records_;
};

}  // namespace ballast
