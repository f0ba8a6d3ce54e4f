// The GPUs that addresses belong to.
#pragma once

#include "tests/emulated_cuda/device_memory.h"

namespace emulated {

DeviceMemory* memory_of(const void* address);  // null: host memory
std::size_t live_device_bytes();

}  // namespace emulated
