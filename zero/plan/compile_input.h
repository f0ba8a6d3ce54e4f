// What a program is compiled from.
#pragma once

#include <ballast/planner.h>

#include <optional>
#include <string>

#include "zero/plan/block.h"
#include "zero/plan/trace.h"

namespace ballast {

struct PlanOptions {
  Placement placement{};
  std::size_t rank = 0;            // number among all ranks: those of a shard group are neighbours
  std::size_t ranks_per_host = 1;  // if each host has as many neighbouring ranks; 1 or less: hosts are not told apart
  std::size_t tile_elements = 0;   // limit of a tile; 0: the sizes of lay_out()
  std::size_t micro_steps = 1;     // backward passes whose gradients one step sums
  StateFormat format = StateFormat::split;
  GradientFormat gradient_format = GradientFormat::fp32;
  optim::StateNames names{};                             // names of the state that the optimizer keeps
  std::string rule{};                                    // name of the update rule
  std::optional<std::size_t> orthogonalization_steps{};  // steps of a rule of whole matrices; none: a rule of elements
  Trace trace{};                                         // the uses of each micro-step; empty: the order of declaration
  Schedule schedule{};
  Wire wire{};
  bool mirror = false;          // each record is written on a drive of another rank too
  bool full_records = false;    // records hold parameters too, so that a run resumes from them alone
  bool host_is_device = false;  // a CPU's: updates on the host need no copies of parameters and gradients
};

// The options of a placement that the planner considers, for a rank.
PlanOptions options_of(const ChoiceInput& question, const Placement& placement, std::size_t rank);

// The options, and the model as it is cut for them.
struct CompileInput : PlanOptions {
  const Model& model;
  const Layout& layout;
  const Blocks& blocks;
  std::size_t rank_in_shard_group = 0;  // whose shards of parameters and state these are
  bool extra_sum_slots = false;         // slots for a second sum of a unit's gradients, even if the trace needs none
  // Bytes of the program that this one replaces; none: as the schedule says.
  std::optional<std::size_t> gathered_bytes{};

  bool needs_matrices() const { return orthogonalization_steps.has_value(); }
  bool gathers_codes() const { return wire.gather != WireFormat::exact && placement.shards > 1; }
  bool gathers_codes(std::size_t unit) const { return gathers_codes() && model.units[unit].dtype != DType::u8; }
  // What a rank keeps of parameters that are gathered on demand: its shard, and those of ranks with other copies.
  Section kept(const Section& section) const { return section.joined(placement.parameter_replicas); }
  Range kept_range(const Section& section) const {
    return kept(section).of_rank(rank_in_shard_group / placement.parameter_replicas);
  }
  std::size_t width(std::size_t unit) const { return byte_size(model.units[unit].dtype); }  // bytes of a parameter
  std::size_t width_of_sums(std::size_t unit) const { return byte_size(dtype_of_sums(unit)); }
  DType dtype_of_sums(std::size_t unit) const {
    return ballast::dtype_of_sums(gradient_format, model.units[unit].dtype);
  }
};

// Cuts a model for its options, and keeps what the input refers to. The model outlives it.
struct CutModel {
  CutModel(const Model& model, const PlanOptions& options);
  CutModel(CutModel&&) = delete;

  Layout layout;
  Blocks blocks;
  CompileInput input;
};

// Its trace, or the order of declaration if it has none.
Trace trace_of(const CompileInput& input);

// Throws an error if the input cannot be compiled. Checks the model and the placement too.
void check(const CompileInput& input);

}  // namespace ballast
