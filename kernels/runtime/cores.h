// The cores that this process may use. Launchers set OMP_NUM_THREADS=1; the affinity mask and the quota are the truth.
#pragma once

#include <cstddef>
#include <filesystem>
#include <vector>

namespace ballast {

std::vector<int> allowed_cores();  // the calling thread's affinity mask, ascending

// How many threads are worth running: the mask's cores, but no more than the container's CPU quota, rounded up.
std::size_t usable_cores(const std::filesystem::path& root = "/");

}  // namespace ballast
