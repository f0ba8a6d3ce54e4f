// The memory that collectives take besides that of their values: codes of encoded ones, and on GPUs what other ranks send to
// reductions; and the wire formats that a placement can have.
#pragma once

#include <ballast/placement.h>

#include "kernels/quantize.h"
#include "kernels/reduction_memory.h"
#include "zero/plan/compile_input.h"

namespace ballast {

// Throws B1005 for formats that the placement cannot have. Nothing is ignored: each format that is not exact has values to
// encode, except on a single rank, which sends nothing.
void check(const Wire& wire, const Placement& placement);

kernels::CodeBits code_bits(WireFormat format);  // takes a format that is not exact

// Return the encoding of a gather of a section's shards, and of a reduction of a unit's gradients. Its memory is in no slot yet.
// Without bytes of memory the collective is exact.
Codes codes_of_gather(const Wire& wire, const Section& section);
Codes codes_of_reduction(const Wire& wire, const Placement& placement, const UnitLayout& unit, Ranks ranks);

// Returns the group of a rank that shards gradients of a unit of so many parts, or that adds those of replicas. `per_host`: ranks of
// each host, if each has as many neighbouring ones; 1 or less: hosts are not told apart.
kernels::ReducingRanks reducing_ranks(const Placement& placement, std::size_t rank, std::size_t per_host, Ranks ranks,
                                      std::size_t parts = 1);

// Returns the most that a reduction takes on a GPU, over all units; none on a CPU.
kernels::ReductionMemory memory_of_reductions(const CompileInput& input);

}  // namespace ballast
