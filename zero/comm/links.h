// TCP connections between the ranks of a group. Only processes that know the job's secret get one.
#pragma once

#include <vector>

#include "kernels/runtime/descriptor.h"
#include "zero/comm/process_group.h"

namespace ballast {

// Returns a connection with each other rank, by rank; none with this one. All ranks of the group call. Throws B3301 or B3302 if a
// rank fails or does not come.
std::vector<Descriptor> connect_links(ProcessGroup& group);

}  // namespace ballast
