// The memory of an emulated GPU: addresses that only the GPU's own work can access.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace emulated {

// Pages of all GPUs are mapped twice: without any rights at the addresses that programs get, and where work of a GPU accesses
// them. Host code that follows a pointer to a GPU's memory ends its process, also while the GPU works.
class DeviceMemory {
 public:
  DeviceMemory(int gpu, std::size_t bytes);

  std::byte* allocate(std::size_t bytes);  // null if too little is free; filled with a pattern, never with zeros
  bool release(std::byte* memory);         // false if it was not allocated
  std::size_t available();
  std::size_t used();

  bool contains(const void* address) const;                   // an address of this GPU
  bool is_allocated(const void* address, std::size_t bytes);  // all of it is one allocation's

 private:
  std::byte* take_place(std::size_t bytes);  // null if too little is free

  std::size_t bytes_;
  std::byte* begin_;
  std::mutex mutex_;  // guards the members below
  std::map<std::byte*, std::size_t> allocated_;
  std::size_t used_ = 0;
};

// The addresses at which work accesses the memory of all GPUs. Programs know other addresses of the same memory.
struct WorkAddresses {
  std::uintptr_t first = 0;
  std::size_t bytes = 0;
  std::uintptr_t known_to_programs = 0;
};
WorkAddresses work_addresses();

}  // namespace emulated
