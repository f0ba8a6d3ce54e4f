// The encoded bytes of collectives, and the wire formats that a placement can have.
#pragma once

#include <ballast/wire.h>

#include "kernels/quantize.h"
#include "zero/plan/layout.h"
#include "zero/plan/program.h"

namespace ballast {

// Throws B1005 for formats that the placement cannot have. Nothing is ignored: each format that is not exact has values to
// encode, except on a single rank, which sends nothing.
void check(const Wire& wire, const Placement& placement);

kernels::CodeBits code_bits(WireFormat format);  // of a format that is not exact

// Return the encoding of a gather of a section's shards, and of a reduction of a unit's gradients. Its memory is in no slot yet.
// Without bytes of memory the collective is exact.
Codes codes_of_gather(const Wire& wire, const Section& section);
Codes codes_of_reduction(const Wire& wire, const Placement& placement, const UnitLayout& unit, Ranks ranks);

}  // namespace ballast
