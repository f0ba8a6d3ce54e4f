// The placement of host memory on machines with several memory nodes. Only this file uses the kernel's NUMA calls.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <vector>

namespace ballast {

std::size_t numa_node_count(const std::filesystem::path& root = "/");  // nodes with memory, at least 1

// Returns the nodes of the given cores; empty on machines with a single node.
std::vector<int> nodes_of_cores(std::span<const int> cores, const std::filesystem::path& root = "/");

// Places pages that are touched later on the node, or on several nodes in turn. A full node spills over to the others.
// Returns false if the kernel forbids it, as Docker does by default; pages then lie near the core that first touches
// them. Without nodes it does nothing.
bool place_on_nodes(std::byte* pages, std::size_t bytes, std::span<const int> nodes);

}  // namespace ballast
