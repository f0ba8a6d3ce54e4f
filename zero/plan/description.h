// The meaning of a training's state, as lines of text. Trainings with equal lines can open each other's records; others find
// there where each element is. A pure value, the same on every rank.
#pragma once

#include <ballast/local_state.h>

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/plan/compile.h"

namespace ballast {

// One fact a line: ranks, stage and rule first, then each unit's parameters, and how its state is cut and kept. Facts
// that may change from one start of a run to the next are left out: learning rates, parameter groups, tiers, schedule.
std::vector<std::string> describe(const CompiledPlan& plan);
std::string describe(const optim::Rule& rule);  // its kind, and how many values of its own it keeps
std::optional<optim::StateNames> names_of_rule(std::string_view described);  // none: describe() does not say so

// Elements of the largest tile that the lines name; 0 if they name none. Cutting the same shards into tiles of at most so
// many elements gives the same tiles again.
std::size_t largest_tile(std::span<const std::string> lines);

struct Difference {
  std::string one;
  std::string other;
};

// What the lines say of the records, with which every element of the state can be found in them. Names are as the lines have
// them; parameter groups and ties are left out.
struct Described {
  Placement placement{};  // the tiers are left out
  std::string rule{};
  StateFormat format = StateFormat::split;  // the format of bf16 units
  Model model{};
  std::vector<std::size_t> tile_elements{};  // one for each unit
};

// None if describe() does not write such lines.
std::optional<Described> read_description(std::span<const std::string> lines);

// A name for each tensor, by unit, that is the same for any number of ranks and in any units: its own if no other tensor of
// the model has it, else that of its unit and its own.
std::vector<std::vector<std::string>> names_in_runs(const Model& model);
// The same. Throws B1005 if ranks have other parts of a unit, whose tensors would share names in the files of all ranks.
std::vector<std::vector<std::string>> names_of_whole_units(const Model& model);

// The first fact in which a training differs from one whose records it adopts, of each: their rules, or the names and shapes
// of their parameters. Frozen ones count if both have some: below stage 3 a training need not know them. Ranks, stage, formats
// and tiles may differ.
std::optional<Difference> first_obstacle(const Described& run, const Model& model, std::string_view rule);

// Returns a digest that is the same in every build and on every machine, because files contain it.
std::uint64_t digest_of(std::span<const std::string> lines);

// The first line of each that the other lacks.
std::optional<Difference> first_difference(std::span<const std::string> one, std::span<const std::string> other);

// Where each element of a training's state is in the records of its ranks, by the description of the training: for others that
// take the records over. A pure value.
class RecordedState {
 public:
  // Elements of a trained tensor that lie in one record.
  struct Part {
    std::size_t shard = 0;
    std::size_t record = 0;   // number in the shard
    std::size_t in_tile = 0;  // the first element
    Range range{};            // a range of the tensor's elements
  };

  // None if describe() does not write such lines. `names` are those of the update rule that the lines name.
  static std::optional<RecordedState> of(std::span<const std::string> lines, const optim::StateNames& names);

  const Described& described() const { return described_; }
  offload::RecordShape shape() const { return blocks_.shape(records_); }  // the run and rank are left out
  // Unit and tensor of each trained one, by its name in names_in_runs().
  const std::map<std::string, std::pair<std::size_t, std::size_t>>& tensors() const { return tensors_; }
  std::vector<std::string> trained() const;  // these names in the order of units
  std::vector<Part> parts_of(const std::string& name, Range range) const;
  ChunkKind kind(std::size_t unit) const;  // of each of its tiles, which is laid out for its `tile_elements`

 private:
  RecordedState(Described described, Layout layout, const optim::StateNames& names);

  Described described_;
  Layout layout_;
  Blocks blocks_;
  std::size_t records_ = 0;                // of a rank
  std::vector<std::size_t> first_record_;  // one for each unit
  std::map<std::string, std::pair<std::size_t, std::size_t>> tensors_;
};

}  // namespace ballast
