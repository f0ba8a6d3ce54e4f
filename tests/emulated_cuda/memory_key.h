// A key of the processor for memory: a thread can access the memory only while it holds the key. Taking and returning it is no
// system call.
#pragma once

#include <cstddef>

namespace emulated {

class MemoryKey {
 public:
  MemoryKey();
  ~MemoryKey();
  MemoryKey(const MemoryKey&) = delete;
  MemoryKey& operator=(const MemoryKey&) = delete;

  bool exists() const { return number_ >= 0; }  // false: the processor or the kernel has none
  void lock(std::byte* memory, std::size_t bytes) const;

  // The calling thread takes the key. It may take it several times.
  void take() const;
  void give_back() const;

 private:
  int number_;
};

}  // namespace emulated
