// Bytes between processes of one machine, through memory that they share: each rank puts what it gives into boxes of its
// own, in pieces that stay in the caches, and the others take it from there.
#pragma once

#include "kernels/runtime/accounts.h"
#include "zero/comm/process_transport.h"

namespace ballast {

// Throws B2301, on all ranks of the group, where one of them cannot reach the memory of another. `make` makes the
// transports of groups that are split off.
std::unique_ptr<Transport> shared_memory_transport(const ProcessGroup& group, MemoryAccounts& accounts,
                                                   const MakeTransport& make);

}  // namespace ballast
