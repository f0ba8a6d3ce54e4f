#pragma once

#include <filesystem>

namespace ballast::offload {

// Returns the number of descriptors that this process has open.
inline std::size_t open_descriptors() {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator{}));
}

}  // namespace ballast::offload
