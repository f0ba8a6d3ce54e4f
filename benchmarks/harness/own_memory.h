// The resident memory of this process.
#pragma once

#include <cstddef>

namespace ballast::benchmarks {

// The resident memory of this process, as the kernel counts it.
struct ResidentMemory {
  std::size_t now = 0;
  std::size_t peak = 0;      // the peak since the process began, or since forget_peak()
  std::size_t of_files = 0;  // part of the current size: mostly code of libraries, which the kernel can reclaim
};

// Reads the counts of all threads. Any thread may call; concurrent allocations may or may not be included.
ResidentMemory resident_memory();

// Resets the peak to the current size. Returns false if the kernel does not support it.
bool forget_peak();

}  // namespace ballast::benchmarks
