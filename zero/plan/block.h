// What a tile is kept as outside the device, and in its record on a drive: its parameter, then its state. A pure value.
#pragma once

#include <vector>

#include "offload/record_format.h"
#include "optim/state_layout.h"
#include "zero/plan/layout.h"

namespace ballast {

// Bytes of a unit's largest tile; smaller ones take as much.
struct BlockSizes {
  std::size_t parameter = 0;
  std::size_t state = 0;

  std::size_t bytes() const { return parameter + state; }
};

struct RecordSizes {
  std::size_t record = 0;
  std::size_t first_record = 0;  // enough for the parameter
  std::size_t payload = 0;       // where it begins in a record
};

// How the state of a unit is kept. Parameters that are not bf16 have fp32 state.
optim::StateKind state_kind(const Unit& unit, kernels::StateFormat format, const optim::StateNames& names);

class Blocks {
 public:
  Blocks(const Model& model, const Layout& layout, kernels::StateFormat format, const optim::StateNames& names);

  const BlockSizes& of(std::size_t unit) const { return sizes_[unit]; }
  const optim::StateLayout& state(std::size_t unit) const { return states_[unit]; }
  const RecordSizes& records() const { return records_; }
  offload::RecordShape shape(std::uint64_t run_id, std::size_t tiles) const;

 private:
  std::vector<BlockSizes> sizes_;           // by unit
  std::vector<optim::StateLayout> states_;  // by unit
  BlockSizes largest_;
  RecordSizes records_;
};

}  // namespace ballast
