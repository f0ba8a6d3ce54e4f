// Who this process is in its job, from the environment that its launcher made. Pure: a function of the variables.
#pragma once

#include <string>

#include "kernels/runtime/environment.h"
#include "zero/comm/socket.h"

namespace ballast {

struct Launch {
  std::string launcher{};  // "torchrun", "Slurm", "Open MPI"; "RANK" for the variables alone; empty: one rank, alone
  std::size_t rank = 0;
  std::size_t size = 1;
  std::size_t local_rank = 0;  // among the ranks of its machine: its GPU
  Endpoint hub{};              // where rank 0 waits for the others
  std::string job{};           // the same on all ranks of a job, and on those of no other
};

// Throws B1006, which names the variable that is missing or cannot be right. Who meets more often than once in a process, as
// all of its job do, says how often before: each time has a port of its own.
Launch launch_from(const Environment& environment, std::size_t times_before = 0);

}  // namespace ballast
