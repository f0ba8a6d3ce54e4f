// The resources of this process: the cores that it may use, the memory nodes, and all of them as a value. Any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/runtime/device.h"
#include "kernels/runtime/host_limits.h"

namespace ballast {

// --- Cores, from the affinity mask and the quota. OMP_NUM_THREADS is ignored, because launchers set it to 1. ---

std::vector<int> allowed_cores();  // the calling thread's affinity mask, ascending

// Returns the useful number of threads: the mask's cores, but at most the container's CPU quota, rounded up.
std::size_t usable_cores(const std::filesystem::path& root = "/");

// Returns those of the calling thread's cores that are on the memory node of a PCI device, such as "0000:3B:00.0"; all of them
// if none is, or if the node is unknown.
std::vector<int> cores_near(std::string_view pci, const std::filesystem::path& root = "/");

// Gives the calling thread, which moves data, short time slices, and none to the threads that it starts, such as those that
// compute for all. A thread with short slices runs sooner after it was woken, also on a core where another thread computes, and
// gets no more of the core in all. So a link waits less for the threads that feed it. Linux has such slices since 6.12; before
// that, and where they are forbidden, this does nothing.
void use_short_time_slices();

// Short slices for the calling thread until the end of this object, and for good in threads started meanwhile.
class ShortTimeSlices {
 public:
  ShortTimeSlices();
  ~ShortTimeSlices();
  ShortTimeSlices(const ShortTimeSlices&) = delete;
  ShortTimeSlices& operator=(const ShortTimeSlices&) = delete;

 private:
  std::uint64_t before_;  // nanoseconds
};

// --- Memory nodes, and the machine ---

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
  std::optional<double> core_quota{};  // the container's quota; none: no quota
  std::size_t numa_nodes = 1;
  HostLimits memory;
  std::vector<Gpu> gpus{};
  std::string no_gpu_because{};  // the reason, if the list of GPUs is empty
};

// Any thread may call. The affinity mask, the rlimits and the GPUs are always those of this process, whatever the root.
ThisMachine detect_machine(const std::filesystem::path& root = "/");

}  // namespace ballast
