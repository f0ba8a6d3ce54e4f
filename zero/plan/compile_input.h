// What a program is compiled from: the order in which a trainer uses units, the options, and the model as it is cut.
#pragma once

#include <ballast/planner.h>
#include <ballast/schedule.h>

#include <optional>
#include <string>

#include "zero/plan/layout.h"
#include "zero/plan/program.h"

namespace ballast {

// A unit's parameters in the memory for gathered ones.
struct GatheredUnit {
  std::size_t unit = 0;
  std::size_t begin = 0;
  std::size_t end = 0;
  bool exact = false;     // see Visit::exact
  std::size_t order = 0;  // off plan: the last uses in their order; those of the list come after all others
};

// The visits of one use of a unit: the units whose tensors it has tied, held, and then the unit itself.
Trace visits_of(const Model& model, std::size_t unit, Phase phase, bool exact = false);

// Forward in the order of declaration, backward in the opposite one.
Trace declared_order(const Model& model);

// Answers questions about a trace. Positions count visits; those of the next step continue those of this one.
class Uses {
 public:
  Uses(Trace trace, std::size_t units);
  const Trace& trace() const { return trace_; }

  std::size_t next(std::size_t unit, std::size_t from) const;  // position of its next visit at `from` or later; or none
  std::size_t last_backward(std::size_t unit) const { return last_backward_[unit]; }  // none: it has no backward visit
  std::size_t backward_visits(std::size_t unit) const { return backward_[unit]; }
  // Whether no other unit is used in backward between its first and its last backward visit.
  bool is_once_in_a_row(std::size_t unit) const { return backward_[unit] > 0 && rows_[unit] == 1; }
  bool ends_in_backward(std::size_t unit) const {  // whether that is its last visit of all
    return backward_[unit] > 0 && positions_[unit].back() == last_backward_[unit];
  }
  bool is_last_backward(std::size_t position) const { return last_backward_[trace_[position].unit] == position; }
  std::size_t end_of_chain(std::size_t position) const;  // one past the visit that ends what is held at `position`
  std::size_t end_of_row(std::size_t position) const;    // one past the equal visits from `position` on
  // One past the visits of the unit at `position` and of the `further` units after it, and at most `end`. A unit counts once: a
  // trainer may visit units in turns, those of a block in several formats.
  std::size_t end_of_units(std::size_t position, std::size_t further, std::size_t end) const;
  std::vector<std::size_t> by_first_visit() const;  // all units, those never visited last
  bool has_forward() const { return has_forward_; }

 private:
  Trace trace_;
  std::vector<std::vector<std::size_t>> positions_;  // one for each unit
  std::vector<std::size_t> backward_;                // one for each unit
  std::vector<std::size_t> last_backward_;           // one for each unit
  std::vector<std::size_t> rows_;                    // one for each unit: how often its backward visits begin anew
  std::vector<std::size_t> row_ends_;                // one for each visit
  bool has_forward_ = false;
};

struct PlanOptions {
  Placement placement{};
  std::size_t rank = 0;            // number among all ranks: those of a shard group are neighbours
  std::size_t ranks_per_host = 1;  // if each host has as many neighbouring ranks; 1 or less: hosts are not told apart
  bool shares_memory = false;      // all ranks are on one machine and reach each other's memory
  std::size_t tile_elements = 0;   // limit of a tile; 0: the sizes of lay_out()
  std::size_t micro_steps = 1;     // passes over the trace whose gradients one step sums
  std::size_t in_one_pass = 1;     // micro-steps that a pass has, with Schedule::layer_major
  StateFormat format = StateFormat::split;
  GradientFormat gradient_format = GradientFormat::fp32;
  optim::StateNames names{};                             // names of the state that the optimizer keeps
  std::string rule{};                                    // name of the update rule
  std::optional<std::size_t> orthogonalization_steps{};  // steps of a rule of whole matrices; none: a rule of elements
  Trace trace{};                                         // the uses of each micro-step; empty: the order of declaration
  Schedule schedule{};
  Wire wire{};
  TransferRates rates{};
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

  bool updates_by_layers() const { return schedule.update_in_backward && in_one_pass > 1; }
  // Whether units whose state is in the records of a run are updated before the norm is known. See Schedule::most_repeats.
  bool updates_early() const {
    return full_records && schedule.most_repeats > 0 && !schedule.update_in_backward && !placement.full_parameters &&
           !needs_matrices();
  }
  bool needs_matrices() const { return orthogonalization_steps.has_value(); }
  bool gathers_codes() const { return wire.gather != WireFormat::exact && placement.shards > 1; }
  bool gathers_codes(std::size_t unit) const { return gathers_codes() && model.units[unit].dtype != DType::u8; }
  // What a rank keeps of parameters that are gathered on demand: its shard, and those of ranks with other copies.
  Section kept(const Section& section) const { return section.joined(placement.parameter_replicas); }
  Range kept_range(const Section& section) const {
    return kept(section).shard_range(rank_in_shard_group / placement.parameter_replicas);
  }
  std::size_t width(std::size_t unit) const { return byte_size(model.units[unit].dtype); }  // bytes of a parameter
  std::size_t width_of_sums(std::size_t unit) const { return byte_size(dtype_of_sums(unit)); }
  DType dtype_of_sums(std::size_t unit) const {
    return ballast::dtype_of_sums(gradient_format, model.units[unit].dtype);
  }
};

// Returns the part of an operation on several tiles that is on one of them.
Op part_on_tile(const CompileInput& input, const Op& op, std::size_t tile);

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
