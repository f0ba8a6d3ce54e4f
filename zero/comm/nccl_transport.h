// A transport between GPUs through NCCL, in the order of a stream. NCCL only moves bytes: its sums have another order.
#pragma once

#include <ballast/memory.h>

#include <string>

#include "zero/comm/process_transport.h"

namespace ballast {

std::string no_nccl_because();  // empty if NCCL can be used

// Throws B2301 without NCCL, which a group of one rank does not need. The backend works on the same stream; calls return
// when their work is issued. `host` carries chunks in host memory. Ranks that make different calls are not detected. A rank
// that does not arrive in time is detected; then the communicators of this process are aborted, so that no stream waits for it.
std::unique_ptr<Transport> nccl_transport(std::unique_ptr<Transport> host, const ProcessGroup& group,
                                          const GpuStream& stream, MemoryAccounts& accounts, const MakeTransport& make);

}  // namespace ballast
