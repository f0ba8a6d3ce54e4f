// Bytes between GPUs through NCCL, in the order of a stream. NCCL adds nothing: its order of additions is its own.
#pragma once

#include "kernels/runtime/accounts.h"
#include "zero/comm/process_transport.h"

namespace ballast {

bool has_nccl();  // this build

// Without it: B2301. The place's stream is the one that the backend works on: calls return when their work
// is issued. `host` carries what lies in host memory. Ranks that make different calls are not found out; a rank that does not
// come in time is, and then nobody waits in the stream any more.
std::unique_ptr<Transport> nccl_transport(std::unique_ptr<Transport> host, const ProcessGroup& group,
                                          const GpuPlace& place, MemoryAccounts& accounts, const MakeTransport& make);

}  // namespace ballast
