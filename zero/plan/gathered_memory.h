// The size of the memory for full parameters that are there only from a gather to the end of their use.
#pragma once

#include "zero/plan/trace.h"

namespace ballast {

// Returns how many units' memory is held at once, at most: in the trace, and for any unit that an off-plan step uses.
std::size_t longest_chain(const Model& model, const Uses& uses);

// Returns enough for any unit in the trace with the `prefetch` ones after it, and for units that are held together, whether they are
// in the trace or not. `unit_bytes`: of each unit's full parameters, aligned; 0 where they stay.
std::size_t bytes_to_gather(const Model& model, const Uses& uses, std::size_t prefetch,
                            const std::vector<std::size_t>& unit_bytes);

}  // namespace ballast
