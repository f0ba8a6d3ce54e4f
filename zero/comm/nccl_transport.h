// Bytes between GPUs through NCCL, in the order of a stream. NCCL adds nothing: its order of additions is its own.
#pragma once

#include "kernels/runtime/accounts.h"
#include "kernels/runtime/device.h"
#include "zero/comm/process_transport.h"

namespace ballast {

// What a rank has on its GPU. The stream is the one that the backend works on: calls return when their work is issued.
struct GpuPlace {
  StreamHandle stream = nullptr;
  int gpu = 0;
};

// Where this build has no NCCL: B2301. `host` carries what lies in host memory. Ranks that make different calls are not
// found out; a rank that does not come is, by whoever waits for the stream.
std::unique_ptr<Transport> nccl_transport(std::unique_ptr<Transport> host, const ProcessGroup& group,
                                          const GpuPlace& place, MemoryAccounts& accounts, const MakeTransport& make);

}  // namespace ballast
