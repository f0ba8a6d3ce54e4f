// The resources of this process, as a value.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "kernels/runtime/device.h"
#include "kernels/runtime/host_limits.h"

namespace ballast {

struct ThisMachine {
  std::string cpu;                     // the model's name
  std::size_t cores = 1;               // useful threads: affinity mask and quota
  std::size_t cores_of_host = 1;       // online, allowed or not
  std::optional<double> core_quota{};  // of the container; none: no quota
  std::size_t numa_nodes = 1;
  HostLimits memory;
  std::vector<Gpu> gpus{};
  std::string no_gpu_because{};  // if the list of GPUs is empty
};

// Any thread may call. The affinity mask, the rlimits and the GPUs are always those of this process, whatever the root.
ThisMachine detect_machine(const std::filesystem::path& root = "/");

}  // namespace ballast
