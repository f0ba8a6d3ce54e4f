// The rank and job of this process, from the environment variables of its launcher. A pure function of the variables.
#pragma once

#include <ballast/comm.h>

#include "kernels/runtime/environment.h"

namespace ballast {

// Throws B1006 that names a missing or wrong variable. A process that connects several times, as all ranks of its job
// then do, passes the number of earlier connections: each has a port of its own.
Launch launch_from(const Environment& environment, std::size_t times_before = 0);

// Whether the launcher says that ranks are on several hosts.
bool has_other_hosts(const Launch& launch, const Environment& environment);

}  // namespace ballast
