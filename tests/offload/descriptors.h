#pragma once

#include <filesystem>

namespace ballast::offload {

// Of this process, now.
inline std::size_t open_descriptors() {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator{}));
}

}  // namespace ballast::offload
