// Where each element of a training's state is in the records of its ranks, by the description of the training: for others that
// take the records over. A pure value.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/plan/block.h"
#include "zero/plan/description.h"

namespace ballast {

class RecordedState {
 public:
  // Elements of a trained tensor that lie in one record.
  struct Part {
    std::size_t shard = 0;
    std::size_t record = 0;   // of the shard
    std::size_t in_tile = 0;  // the first element
    Range range{};            // of the tensor's elements
  };

  // None if describe() does not write such lines. `names` are those of the update rule that the lines name.
  static std::optional<RecordedState> of(std::span<const std::string> lines, const optim::StateNames& names);

  const Described& described() const { return described_; }
  offload::RecordShape shape() const { return blocks_.shape(tiles_.size()); }  // without run and rank
  std::vector<std::string> trained() const;                                    // names_in_runs(), in the order of units
  std::vector<Part> parts_of(const std::string& name, Range range) const;
  TileMemory tile(std::size_t record, std::byte* payload) const;

 private:
  RecordedState(Described described, Layout layout, const optim::StateNames& names);

  Described described_;
  Layout layout_;
  Blocks blocks_;
  std::vector<std::pair<std::size_t, std::size_t>> tiles_;              // of each record: unit and tile
  std::vector<std::size_t> first_record_;                               // by unit
  std::map<std::string, std::pair<std::size_t, std::size_t>> tensors_;  // trained ones by name: unit and tensor
};

}  // namespace ballast
