// Connects a process to the other ranks of its job: finds its rank and its job in the environment variables of its launcher, and
// makes a communicator with parts that the caller owns.
#pragma once

#include <ballast/comm.h>

#include "kernels/backend.h"
#include "kernels/runtime/environment.h"

namespace ballast {

// The rank and job of this process. A pure function of the variables. Throws B1006 that names a missing or wrong variable. A
// process that connects several times, as all ranks of its job then do, passes the number of earlier connections: each has a
// port of its own.
Launch launch_from(const Environment& environment, std::size_t times_before = 0);

// Whether the launcher says that ranks are on several hosts.
bool has_other_hosts(const Launch& launch, const Environment& environment);

// They outlive the communicator and all groups that are split from it.
struct ConnectParts {
  kernels::Backend& backend;  // adds
  MemoryAccounts& accounts;   // book the communicator's memory
  Environment environment{};
};

// Adds with the backend of the parts, whatever threads the options name.
std::unique_ptr<Communicator> connect(const ConnectOptions& options, const ConnectParts& parts);

// The timeout of every wait: that of the options, or BALLAST_TIMEOUT, or five minutes.
std::chrono::milliseconds timeout_of(const ConnectOptions& options, const Environment& environment);

}  // namespace ballast
