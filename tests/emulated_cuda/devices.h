// The emulated GPUs of this process.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "tests/emulated_cuda/device_memory.h"
#include "tests/emulated_cuda/emulated.h"
#include "tests/emulated_cuda/nccl_order.h"
#include "tests/emulated_cuda/streams.h"

namespace emulated {

struct Device {
  Device(int ordinal, std::size_t bytes) : gpu(ordinal), memory(ordinal, bytes), null_stream(ordinal) {}

  int gpu;
  DeviceMemory memory;
  NcclOrder nccl_order{};
  std::mutex nccl_kernel{};  // held by the one kernel of NCCL that runs
  CUstream_st null_stream;
};

int gpus();
cudaError_t use_context(int gpu, const char* call);  // makes it at the first use
Device& device(int gpu);                             // the GPU has a context
std::vector<Device*> devices_with_context();
std::size_t total_memory();

}  // namespace emulated
