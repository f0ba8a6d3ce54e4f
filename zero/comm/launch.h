// The rank and job of this process, from the environment variables of its launcher. A pure function of the variables.
#pragma once

#include <string>

#include "kernels/runtime/environment.h"
#include "zero/comm/socket.h"

namespace ballast {

struct Launch {
  std::string launcher{};  // "torchrun", "Slurm", "Open MPI"; "RANK" for the variables alone; empty: a single rank
  std::size_t rank = 0;
  std::size_t size = 1;
  std::size_t local_rank = 0;  // among the ranks of its machine: its GPU
  Endpoint hub{};              // the address of rank 0
  std::string job{};           // the same on all ranks of a job, and on those of no other
};

// Throws B1006 that names a missing or wrong variable. A process that connects several times, as all ranks of its job
// then do, passes the number of earlier connections: each has a port of its own.
Launch launch_from(const Environment& environment, std::size_t times_before = 0);

}  // namespace ballast
