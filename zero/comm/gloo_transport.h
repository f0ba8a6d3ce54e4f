// Bytes from process to process through Gloo: TCP, on the address by which this process reaches its hub.
#pragma once

#include "kernels/runtime/accounts.h"
#include "zero/comm/process_transport.h"

namespace ballast {

bool has_gloo();  // this build

// Without it: B2301. `make` makes the transports of groups that are split off.
std::unique_ptr<Transport> gloo_transport(const ProcessGroup& group, MemoryAccounts& accounts,
                                          const MakeTransport& make);

}  // namespace ballast
