// The manifest of a run says what its records hold. A pure value, the same on every rank.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint/files.h"
#include "zero/plan/compile.h"

namespace ballast {

// The manifest of the run that this training would begin: see run_manifest_of().
std::string describe(const CompiledPlan& plan);

// Files contain it: it is the same in every build and on every machine.
std::uint64_t digest_of(const std::string& manifest);

struct Difference {
  std::string one;
  std::string other;
};

// Compares a training with a run whose records it adopts: their rules, and the names and shapes of their parameters. Returns the
// first difference. Frozen parameters are compared if both sides have some, because a training below stage 3 need not know them.
// Ranks, stage, formats and tiles may differ.
std::optional<Difference> first_obstacle(const SavedCheckpoint& run, const CompiledPlan& plan);

// Finds the elements of a training's state in the records of its ranks. Other ranks adopt the records with it.
class RecordedState {
 public:
  // Elements of a trained tensor that lie in one record.
  struct Part {
    std::size_t shard = 0;
    std::size_t record = 0;   // number in the shard
    std::size_t in_tile = 0;  // the first element
    Range range{};            // a range of the tensor's elements
  };

  // None for a text that is no manifest of a run.
  static std::optional<RecordedState> of(const std::string& manifest);

  const SavedCheckpoint& saved() const { return saved_; }
  const Placement& placement() const { return saved_.layout->placement; }
  StateFormat format() const;                                             // of bf16 units
  offload::RecordShape shape() const { return blocks_.shape(records_); }  // the run and rank are left out
  // Unit and tensor of each trained one, by its name in names_in_runs().
  const std::map<std::string, std::pair<std::size_t, std::size_t>>& places() const { return places_; }
  std::vector<std::string> trained() const;  // these names in the order of units
  // Elements of the largest tile. Cutting the same shards into tiles of at most so many elements gives the same tiles again.
  std::size_t largest_tile() const;
  // Elements for which each record of a unit is laid out, as a chunk of its tensors' kind.
  std::size_t record_elements(std::size_t unit) const { return layout_.units[unit].tile_elements; }
  std::vector<Part> parts_of(const std::string& name, Range range) const;

 private:
  explicit RecordedState(SavedCheckpoint saved);

  SavedCheckpoint saved_;
  Model model_;
  Layout layout_;
  Blocks blocks_;
  std::size_t records_ = 0;                // of a rank
  std::vector<std::size_t> first_record_;  // one for each unit
  std::map<std::string, std::pair<std::size_t, std::size_t>> places_;
};

}  // namespace ballast
