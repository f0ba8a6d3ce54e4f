// What of this process's memory is really there, as the kernel counts it; and a limit that the kernel keeps.
#pragma once

#include <cstddef>
#include <filesystem>

namespace ballast {

struct ResidentMemory {
  std::size_t now = 0;
  std::size_t peak = 0;      // since the process began, or since forget_peak()
  std::size_t of_files = 0;  // of it now: libraries' code for the most part, which the kernel can take back
};

// Of all threads. Any thread may call; what other threads take meanwhile may be in or not.
ResidentMemory resident_memory(const std::filesystem::path& root = "/");

// The peak begins anew with what is there now. False where the kernel does not do that.
bool forget_peak();

// From now on this process, with all that is mapped into it, cannot hold more than this, whoever asks: its private memory is
// limited (RLIMIT_DATA) to what the libraries and stacks leave. Refused (B2001) where that is nothing.
void limit_own_memory(std::size_t bytes);

}  // namespace ballast
