// Where host memory lies on machines with several memory nodes. The only place that knows the kernel's NUMA calls.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <vector>

namespace ballast {

std::size_t numa_node_count(const std::filesystem::path& root = "/");  // nodes with memory, at least 1

// The nodes to which the given cores belong. Empty where there is one node only: then there is nothing to choose.
std::vector<int> nodes_of_cores(std::span<const int> cores, const std::filesystem::path& root = "/");

// Pages that are touched from now on come from the one node, or in turn from each of several. A full node spills over
// to the others instead of failing. False where the kernel forbids it, as Docker does by default; memory then lies
// near the core that first touches it. No nodes: does nothing.
bool place_on_nodes(std::byte* pages, std::size_t bytes, std::span<const int> nodes);

}  // namespace ballast
