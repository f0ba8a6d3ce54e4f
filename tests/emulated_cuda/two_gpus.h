// Two ranks in processes of their own, each with a GPU, whose groups NCCL connects.
#pragma once

#include "kernels/runtime/stream.h"
#include "tests/comm/process_groups.h"
#include "tests/emulated_cuda/emulated.h"
#include "zero/comm/call.h"

namespace ballast::testing {

struct RankOnGpu {
  explicit RankOnGpu(Communicator& ranks) : world(ranks), gpu(static_cast<int>(ranks.rank())) {}

  // Returns the group of the ranks with the same color, on their GPUs.
  std::unique_ptr<Communicator> split(std::size_t color = 0, bool only_gathers = false) {
    const Channel channel{{stream.handle(), gpu, only_gathers}, backend.get()};
    return world.split(color, &channel);
  }

  // The same, for gathers of what they keep in host memory.
  std::unique_ptr<Communicator> split_host() {
    const Channel channel{{.stream = stream.handle(), .gpu = gpu, .from_host = true}, backend.get()};
    return world.split(0, &channel);
  }

  Communicator& world;
  int gpu;
  Stream stream{gpu};
  std::unique_ptr<kernels::Backend> backend = kernels::cuda_backend(stream.handle(), gpu);
};

// Returns what ended the ranks.
inline Failures failures_on_two_gpus(const std::function<void(RankOnGpu&)>& body,
                                     std::chrono::milliseconds timeout = patient) {
  const ProcessGroupRig rig(2, HostTransport::shared_memory, timeout);
  Processes processes(2, [&](std::size_t rank) {
    rig.as_rank(rank, [&](Communicator& world) {
      RankOnGpu on_gpu(world);
      body(on_gpu);
    });
  });
  return processes.failures();
}

}  // namespace ballast::testing
