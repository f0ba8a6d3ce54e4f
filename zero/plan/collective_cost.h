// The time of a collective on the links of its ranks.
#pragma once

#include <ballast/planner.h>

#include "zero/plan/program.h"

namespace ballast {

double part_of_others(std::size_t ranks);  // what a rank gets from the other ones, of all that it gets

// The seconds that a gather or a reduction takes to move its bytes. Each byte comes to a host once, through the link of one of
// its ranks, and is passed on inside of the host.
double seconds_on_links(const Op& op, const Placement& placement, const Machine& machine);

// The same of an exchange in which a rank of those that share the state sends so many bytes, as many to each other one.
double seconds_of_exchange(double bytes, const Placement& placement, const Machine& machine);

}  // namespace ballast
