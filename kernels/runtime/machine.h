// The resources of this process, as a value.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/runtime/device.h"
#include "kernels/runtime/host_limits.h"

namespace ballast {

// The placement of host memory on machines with several memory nodes. Only this file uses the kernel's NUMA calls.
std::size_t numa_node_count(const std::filesystem::path& root = "/");  // nodes with memory, at least 1

// Returns the nodes of the given cores; empty on machines with a single node.
std::vector<int> nodes_of_cores(std::span<const int> cores, const std::filesystem::path& root = "/");

// Places pages that are touched later on the node, or on several nodes in turn. A full node spills over to the others.
// Returns false if the kernel forbids it, as Docker does by default; pages then lie near the core that first touches
// them. Without nodes it does nothing.
bool place_on_nodes(std::byte* pages, std::size_t bytes, std::span<const int> nodes);

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
