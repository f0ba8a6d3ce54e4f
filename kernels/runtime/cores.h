// The cores that this process may use, from the affinity mask and the quota. OMP_NUM_THREADS is ignored, because
// launchers set it to 1. Any thread may call.
#pragma once

#include <cstddef>
#include <filesystem>
#include <vector>

namespace ballast {

std::vector<int> allowed_cores();  // the calling thread's affinity mask, ascending

// Returns the useful number of threads: the mask's cores, but at most the container's CPU quota, rounded up.
std::size_t usable_cores(const std::filesystem::path& root = "/");

}  // namespace ballast
