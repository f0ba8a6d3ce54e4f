// Memory for tests that is fit for direct I/O, and its patterns.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/runtime/host_pages.h"

namespace ballast::offload {

class Aligned {
 public:
  explicit Aligned(std::size_t bytes) : bytes_(bytes), pages_(map_host_pages(bytes, "a test")) {}
  std::span<std::byte> span() const { return {pages_.get(), bytes_}; }

 private:
  std::size_t bytes_;
  HostPages pages_;
};

// Fills in bytes that differ, in most places, from those of every other key.
inline void fill_pattern(std::span<std::byte> bytes, std::uint64_t key) {
  std::uint64_t state = (key + 1) * 0x9e3779b97f4a7c15;
  for (std::byte& byte : bytes) {
    state = state * 6364136223846793005 + 1442695040888963407;
    byte = static_cast<std::byte>(state >> 56);
  }
}

inline bool holds_pattern(std::span<const std::byte> bytes, std::uint64_t key) {
  std::uint64_t state = (key + 1) * 0x9e3779b97f4a7c15;
  for (const std::byte byte : bytes) {
    state = state * 6364136223846793005 + 1442695040888963407;
    if (byte != static_cast<std::byte>(state >> 56)) return false;
  }
  return true;
}

}  // namespace ballast::offload
