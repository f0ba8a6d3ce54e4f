// What a program costs: memory in each tier, and the time of each operation on a machine, if it does not wait.
#pragma once

#include <ballast/planner.h>

#include <span>

#include "zero/plan/layout.h"
#include "zero/plan/program.h"

namespace ballast {

// The memory that a program needs in each tier: the sum of its slots. The engine reserves exactly these bytes.
Ledger ledger_of(const Program& program, const RecordSizes& records);
Ledger together(Ledger one, const Ledger& other);  // adds up two trainings

struct SimulationInput {
  const Program& program;
  Placement placement;
  Machine machine;
  std::span<const UnitWork> work;  // one for each unit
  bool waits_for_updates = false;  // the trainer begins no step before the updates of the last one are done
};

std::size_t bytes_moved(const Op& op, const Placement& placement);  // counts processed bytes too
double seconds_of(const Op& op, const SimulationInput& input);

// The seconds for which the bytes that the operation moves in the host's memory would take all of its rate: 0 on CPUs, where
// those who use it take turns on the cores.
double seconds_of_host_memory(const Op& op, const SimulationInput& input);

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
