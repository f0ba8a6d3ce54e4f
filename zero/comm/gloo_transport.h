// A transport between processes through Gloo, over TCP on the address by which this process reaches its hub.
#pragma once

#include <ballast/memory.h>

#include "zero/comm/process_transport.h"

namespace ballast {

bool has_gloo();  // whether this build includes Gloo

// Throws B2301 without Gloo. `make` makes the transports of groups that are split off. All ranks of the group call.
std::unique_ptr<Transport> gloo_transport(const ProcessGroup& group, MemoryAccounts& accounts,
                                          const MakeTransport& make);

}  // namespace ballast
