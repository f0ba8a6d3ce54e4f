// The order of NCCL's work on a GPU. Kernels of two communicators may be unable to run at once, so ranks that run them in
// different orders wait for each other for ever. NCCL asks that the work of different communicators is ordered on the
// GPU, by stream or event.
#pragma once

#include <array>
#include <cstdint>

#include "tests/emulated_cuda/emulated.h"

struct CUstream_st;

namespace emulated {

// The number of each GPU's last NCCL work that precedes a point in a stream.
using NcclClock = std::array<std::uint64_t, max_gpus>;

inline void advance(NcclClock& clock, const NcclClock& other) {
  for (std::size_t gpu = 0; gpu < clock.size(); ++gpu) {
    clock[gpu] = clock[gpu] < other[gpu] ? other[gpu] : clock[gpu];
  }
}

struct NcclOrder {
  std::uint64_t issued = 0;
  const void* last_communicator = nullptr;
};

// Checks that the work of a communicator comes after that of all others on its GPU, and notes that it is the newest.
void order_on_gpu(const void* communicator, NcclOrder& order, CUstream_st& stream);

}  // namespace emulated
