// Bytes between processes of one machine, through memory that they share: each rank puts what it gives into boxes of its
// own, in pieces that stay in the caches, and the others take it from there. What lies in memory that they share is taken
// from where it is.
#pragma once

#include "kernels/runtime/accounts.h"
#include "zero/comm/process_transport.h"
#include "zero/comm/shared_pages.h"

namespace ballast {

// Throws B2301, on all ranks of the group, where one of them cannot reach the memory of another. `make` makes the
// transports of groups that are split off, which have the same `pages`: those of the process.
std::unique_ptr<Transport> shared_memory_transport(const ProcessGroup& group, std::shared_ptr<SharedPages> pages,
                                                   MemoryAccounts& accounts, const MakeTransport& make);

}  // namespace ballast
