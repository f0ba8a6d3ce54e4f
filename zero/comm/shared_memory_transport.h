// A transport between processes of one machine, through shared memory. Each rank copies what it sends into its own
// buffers, in pieces that fit the caches, and the others read them there. Arrays that lie in shared memory are read in
// place.
#pragma once

#include <ballast/memory.h>

#include "zero/comm/process_transport.h"
#include "zero/comm/shared_pages.h"

namespace ballast {

// Throws B2301 on all ranks of the group if one of them cannot map the memory of another. `make` makes the transports
// of groups that are split off; they have the same `pages`, those of the process.
std::unique_ptr<Transport> shared_memory_transport(const ProcessGroup& group, std::shared_ptr<SharedPages> pages,
                                                   MemoryAccounts& accounts, const MakeTransport& make);

}  // namespace ballast
