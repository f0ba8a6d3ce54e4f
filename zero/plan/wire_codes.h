// The encoded bytes of collectives, and the wire formats that a placement can have.
#pragma once

#include <ballast/wire.h>

#include "zero/plan/layout.h"
#include "zero/plan/program.h"

namespace ballast {

// Throws B1001 or B1005 for formats that the placement cannot have. Nothing is ignored: each format that is not exact has values
// to encode, except on a single rank, which sends nothing.
void check(const Wire& wire, const Placement& placement);

// What a gather of a section's shards, or a reduction of a unit's gradients, encodes: the formats, and the bytes of memory that
// this takes, in no slot yet. Without bytes it is exact.
Codes codes_of_gather(const Wire& wire, const Section& section);
Codes codes_of_reduction(const Wire& wire, const Placement& placement, const UnitLayout& unit, Ranks ranks);

// The bytes that a rank receives in an encoded collective of as many ranks.
std::size_t received_bytes(const Op& op, std::size_t ranks);

}  // namespace ballast
