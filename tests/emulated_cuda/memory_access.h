// Access to the memory of all GPUs that some addresses belong to.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "tests/emulated_cuda/device_memory.h"

namespace emulated {

DeviceMemory* memory_of(const void* address);  // null: host memory
std::size_t live_device_bytes();

class MemoryAccess {
 public:
  MemoryAccess(std::initializer_list<const void*> addresses);

 private:
  using Access = DeviceMemory::Access;
  std::vector<std::unique_ptr<Access>> accesses_;
};

}  // namespace emulated
