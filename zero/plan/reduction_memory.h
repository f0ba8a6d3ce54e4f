// The memory of a GPU in which the reductions of a plan receive what other ranks send.
#pragma once

#include "kernels/reduction_memory.h"
#include "zero/plan/compile_input.h"
#include "zero/plan/program.h"

namespace ballast {

// Returns the group of a rank that shards gradients, or that adds those of replicas. `per_host`: ranks of each host, if each has
// as many neighbouring ones; 1 or less: hosts are not told apart.
kernels::ReducingRanks reducing_ranks(const Placement& placement, std::size_t rank, std::size_t per_host, Ranks ranks);

// Returns the most that a reduction takes, over all units.
kernels::ReductionMemory memory_of_reductions(const CompileInput& input);

}  // namespace ballast
