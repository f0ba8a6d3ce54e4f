// The limits on this process's memory, cores and tasks, and what is left of them: those of the container's control group (version 1
// or 2), and those of the host and the process.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string_view>

#include "kernels/runtime/environment.h"

namespace ballast {

// A limit on bytes of memory, or on processes and threads.
struct ResourceLimit {
  std::size_t limit = 0;
  std::size_t used = 0;
  std::filesystem::path file{};  // the limit's file; empty: it has none

  std::size_t left() const { return limit > used ? limit - used : 0; }
};

// --- The control group. Any thread may call. ---

// Groups are nested, and each may have a limit. Returns the one with the least memory left; nothing if there is no
// limit. Used memory excludes the file cache, which the kernel drops before it kills a process.
std::optional<ResourceLimit> cgroup_memory(const std::filesystem::path& root = "/");

// Returns the CPU quota in cores, such as 1.5: the smallest of the nested groups. Nothing if there is no quota.
std::optional<double> cgroup_cores(const std::filesystem::path& root = "/");

// Returns the limit on processes and threads with the least left of the nested groups; nothing if there is no limit.
std::optional<ResourceLimit> cgroup_tasks(const std::filesystem::path& root = "/");

// --- Host memory ---

struct HostLimits {
  std::size_t total_bytes = 0;
  std::size_t available_bytes = 0;                   // the kernel's estimate without swapping; all without /proc
  bool is_stated = false;                            // both are of the memory that BALLAST_HOST_MEMORY states
  std::optional<ResourceLimit> cgroup{};             // none: no limit
  std::optional<std::size_t> memlock_bytes{};        // RLIMIT_MEMLOCK; none: no limit
  std::optional<std::size_t> address_space_bytes{};  // RLIMIT_AS; none: no limit
  std::optional<ResourceLimit>
      private_memory{};  // RLIMIT_DATA: private writable memory, resident or not; none: no limit
};

// Any thread may read. The rlimits are always this process's own, whatever the root. BALLAST_HOST_MEMORY states the size of a
// memory that grows as it is used, as that of some virtual machines and sandboxes: the kernel knows only the present one.
HostLimits read_host_limits(const std::filesystem::path& root = "/", const Environment& environment = {});

// Throws B2001 for an allocation after which the machine or the container would kill the process. Other processes may
// take memory between this check and the allocation.
void require_host_memory(std::size_t bytes, std::string_view owner, const HostLimits& limits);

}  // namespace ballast
