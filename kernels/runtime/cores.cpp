#include "kernels/runtime/cores.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/runtime/cgroup.h"

namespace ballast {

std::vector<int> allowed_cores() {
  std::array<cpu_set_t, 8> mask{};  // room for 8,192 cores
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof(mask), mask.data()) == 0) {
    for (std::size_t core = 0; core < mask.size() * CPU_SETSIZE; ++core) {
      if (CPU_ISSET_S(core, sizeof(mask), mask.data())) {
        cores.push_back(static_cast<int>(core));
      }
    }
  }
  return cores;
}

std::size_t usable_cores(const std::filesystem::path& root) {
  const std::size_t allowed = std::max<std::size_t>(allowed_cores().size(), 1);
  const std::optional<double> quota = cgroup_cores(root);
  return quota ? std::clamp<std::size_t>(static_cast<std::size_t>(std::ceil(*quota)), 1, allowed) : allowed;
}

}  // namespace ballast
