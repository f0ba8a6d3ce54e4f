// The GPU stream that a group works on.
#pragma once

#include <ballast/comm.h>

namespace ballast {

namespace kernels {
class Backend;
}

struct GpuStream {
  StreamHandle stream = nullptr;
  int gpu = 0;
  // No rank sends a part to one other. NCCL then connects fewer ranks with each other, which takes gigabytes less memory.
  bool only_gathers = false;
};

// The stream of a group, and the backend that adds on it. Both outlive the group. Calls of a group with a channel return
// when their work is issued into the stream. Processes then use NCCL, whatever transport the parent group has (B2301
// without NCCL), and threads copy on the GPU.
struct Channel {
  GpuStream stream{};
  kernels::Backend* backend = nullptr;
};

}  // namespace ballast
