// The bytes of GPU memory that a kernel reads and writes. Kernels are compiled with GCC's and Clang's instrumentation for
// ThreadSanitizer, which calls a function before each access of memory; these functions are ours.
#pragma once

#include <memory>
#include <vector>

#include "tests/emulated_cuda/memory_order.h"

namespace emulated {

// Records the accesses of this thread while it lives.
class KernelAccesses {
 public:
  KernelAccesses();
  ~KernelAccesses();
  KernelAccesses(const KernelAccesses&) = delete;
  KernelAccesses& operator=(const KernelAccesses&) = delete;

  std::vector<Access> ranges() const;

  class Pages;

 private:
  std::unique_ptr<Pages> pages_;
};

// Records an access of a kernel that runs on this thread; nothing if none does. The address is that of in_work().
void record(const void* address, std::size_t bytes, bool writes);

}  // namespace emulated
