// The memory of an emulated GPU: addresses that only the GPU's own work can access.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

#include "tests/emulated_cuda/memory_key.h"

namespace emulated {

class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* allocate(std::size_t bytes);  // null if too little is free; filled with a pattern, never with zeros
  bool release(std::byte* memory);         // false if it was not allocated
  std::size_t available();
  std::size_t used();

  bool contains(const void* address) const;                   // an address of this GPU
  bool is_allocated(const void* address, std::size_t bytes);  // all of it is one allocation's

  // While an object lives, the thread that made it can access the memory: it does work of the GPU. Where the processor has
  // no keys, all threads can.
  class Access {
   public:
    explicit Access(DeviceMemory& memory) : memory_(memory) { memory_.open(); }
    ~Access() { memory_.close(); }
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;

   private:
    DeviceMemory& memory_;
  };

 private:
  std::byte* take_place(std::size_t bytes);  // null if too little is free
  void open();
  void close();
  void protect(int rights);

  std::size_t bytes_;
  std::byte* begin_;
  MemoryKey key_;
  std::mutex mutex_;  // guards the members below
  std::map<std::byte*, std::size_t> allocated_;
  std::size_t used_ = 0;
  std::size_t accesses_ = 0;
};

}  // namespace emulated
