// What a program is compiled from.
#pragma once

#include <ballast/gradient_format.h>
#include <ballast/wire.h>

#include <optional>

#include "kernels/reduction_memory.h"
#include "zero/plan/block.h"
#include "zero/plan/trace.h"

namespace ballast {

struct CompileInput {
  const Model& model;
  const Layout& layout;
  const Blocks& blocks;
  Placement placement;
  std::size_t rank_in_shard_group = 0;  // whose shards of parameters and state these are
  std::size_t micro_steps = 1;          // backward passes whose gradients one step sums
  Trace trace{};                        // of each micro-step; empty: the order of declaration
  Schedule schedule{};
  GradientFormat gradient_format = GradientFormat::fp32;
  Wire wire{};
  bool mirror = false;                                   // each record is written on a drive of another rank too
  std::optional<std::size_t> orthogonalization_steps{};  // of a rule of whole matrices; none: of elements
  bool host_is_device = false;   // on a CPU: updates on the host need no copies of parameters and gradients
  bool extra_sum_slots = false;  // slots for a second sum of a unit's gradients, even if the trace needs none
  // On GPUs: the groups whose reductions take memory (reduction_memory.h); of one rank: none.
  kernels::ReducingRanks shard_group{};
  kernels::ReducingRanks replica_group{};
  std::optional<std::size_t> gathered_bytes{};  // of the program that this one replaces; none: as the schedule says

  bool needs_matrices() const { return orthogonalization_steps.has_value(); }
  bool gathers_codes() const { return wire.gather != WireFormat::exact && placement.shards > 1; }
  bool gathers_codes(std::size_t unit) const { return gathers_codes() && model.units[unit].dtype != DType::u8; }
  // What a rank keeps of parameters that are gathered on demand: its shard, and those of ranks with other copies.
  Section kept(const Section& section) const { return section.joined(placement.parameter_replicas); }
  Range kept_range(const Section& section) const {
    return kept(section).of_rank(rank_in_shard_group / placement.parameter_replicas);
  }
  DType dtype_of_sums(std::size_t unit) const {
    return ballast::dtype_of_sums(gradient_format, model.units[unit].dtype);
  }
};

// Its trace, or the order of declaration if it has none.
Trace trace_of(const CompileInput& input);

// Throws an error if the input cannot be compiled. Checks the model and the placement too.
void check(const CompileInput& input);

}  // namespace ballast
