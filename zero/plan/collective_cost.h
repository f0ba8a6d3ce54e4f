// The time of a collective on the links of its ranks.
#pragma once

#include <ballast/planner.h>

#include "zero/plan/program.h"

namespace ballast {

double part_of_others(std::size_t ranks);  // what a rank gets from the other ones, of all that it gets

// The seconds that a collective takes of the links inside of a host, and of those between hosts.
struct LinkSeconds {
  double inside = 0;
  double across = 0;

  double sum() const { return inside + across; }
};

// What a gather, a reduction or an exchange of matrices takes to move its bytes. Each byte of the first two comes to a host once,
// through the link of one of its ranks, and is passed on inside of the host.
LinkSeconds seconds_on_links(const Op& op, const Placement& placement, const Machine& machine);

}  // namespace ballast
