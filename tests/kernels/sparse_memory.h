// Address space for arrays of very many elements. Pages that were never written read as zeros and take no memory.
#pragma once

#include <sys/mman.h>

#include <cstddef>

namespace ballast::kernels {

class SparseMemory {
 public:
  explicit SparseMemory(std::size_t bytes) : bytes_(bytes) {
    memory_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (exists()) {
      madvise(memory_, bytes, MADV_HUGEPAGE);  // one zero page of 2 MiB instead of 512 small ones
    }
  }
  ~SparseMemory() {
    if (exists()) {
      munmap(memory_, bytes_);
    }
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  bool exists() const { return memory_ != MAP_FAILED; }
  std::byte* data() const { return static_cast<std::byte*>(memory_); }

 private:
  std::size_t bytes_;
  void* memory_;
};

}  // namespace ballast::kernels
