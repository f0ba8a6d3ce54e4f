// The form of a tile outside the device: its parameter, then its state. A record on a drive leaves the parameter out if
// memory keeps it, unless a run has to resume from its records alone. A pure value.
#pragma once

#include <ballast/placement.h>

#include <algorithm>
#include <vector>

#include "offload/record_format.h"
#include "optim/state_layout.h"
#include "zero/plan/layout.h"

namespace ballast {

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

  std::size_t of_parameters() const { return std::max(first_record, frozen); }  // enough to read those of any tile
};

// Parameters that are not bf16 have fp32 state.
optim::StateKind state_kind(const Unit& unit, StateFormat format, const optim::StateNames& names);

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
