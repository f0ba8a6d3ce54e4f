// The order of NCCL's work on a GPU. Kernels of two communicators may be unable to run at once, so ranks that run them in
// different orders wait for each other for ever. NCCL asks that the work of different communicators is ordered on the
// GPU, by stream or event.
#pragma once

#include <mutex>

#include "tests/emulated_cuda/clock.h"

namespace emulated {

struct NcclOrder {
  std::mutex mutex{};  // guards the members below
  IssuedPtr last{};
  const void* last_communicator = nullptr;
};

// Checks that the work of a communicator comes after that of all others on its GPU, and notes that it is the newest.
void order_on_gpu(const void* communicator, NcclOrder& order, const IssuedPtr& work);

}  // namespace emulated
