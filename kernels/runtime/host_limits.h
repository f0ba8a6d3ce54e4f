// The limits on this process's memory, cores and tasks, and what is left of them: those of the container's control group (version 1
// or 2), and those of the host and the process.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string_view>

#include "kernels/runtime/environment.h"

namespace ballast {

// --- The control group. Any thread may call. ---

struct CgroupMemory {
  std::size_t limit_bytes;
  std::size_t used_bytes;      // excludes the file cache, which the kernel drops before it kills a process
  std::filesystem::path file;  // the limit's file

  std::size_t available_bytes() const { return limit_bytes > used_bytes ? limit_bytes - used_bytes : 0; }
};

// Groups are nested, and each may have a limit. Returns the one with the least memory left; nothing if there is no
// limit.
std::optional<CgroupMemory> cgroup_memory(const std::filesystem::path& root = "/");

// Returns the CPU quota in cores, such as 1.5: the smallest of the nested groups. Nothing if there is no quota.
std::optional<double> cgroup_cores(const std::filesystem::path& root = "/");

struct CgroupTasks {
  std::size_t limit;
  std::size_t used;
  std::filesystem::path file;  // the limit's file

  std::size_t left() const { return limit > used ? limit - used : 0; }
};

// Returns the limit on processes and threads with the least left of the nested groups; nothing if there is no limit.
std::optional<CgroupTasks> cgroup_tasks(const std::filesystem::path& root = "/");

// --- Host memory ---

// RLIMIT_DATA: private writable memory, resident or not.
struct PrivateMemory {
  std::size_t limit_bytes = 0;
  std::size_t used_bytes = 0;
  std::size_t available_bytes() const { return used_bytes < limit_bytes ? limit_bytes - used_bytes : 0; }
};

struct HostLimits {
  std::size_t total_bytes = 0;
  std::size_t available_bytes = 0;                   // the kernel's estimate without swapping; all without /proc
  bool is_stated = false;                            // both are of the memory that BALLAST_HOST_MEMORY states
  std::optional<CgroupMemory> cgroup{};              // none: no limit
  std::optional<std::size_t> memlock_bytes{};        // RLIMIT_MEMLOCK; none: no limit
  std::optional<std::size_t> address_space_bytes{};  // RLIMIT_AS; none: no limit
  std::optional<PrivateMemory> private_memory{};     // none: no limit
};

// Any thread may read. The rlimits are always this process's own, whatever the root. BALLAST_HOST_MEMORY states the size of a
// memory that grows as it is used, as that of some virtual machines and sandboxes: the kernel knows only the present one.
HostLimits read_host_limits(const std::filesystem::path& root = "/", const Environment& environment = {});

// Throws B2001 for an allocation after which the machine or the container would kill the process. Other processes may
// take memory between this check and the allocation.
void require_host_memory(std::size_t bytes, std::string_view owner, const HostLimits& limits);

// The resident memory of this process, as the kernel counts it, and a limit that the kernel enforces.
struct ResidentMemory {
  std::size_t now = 0;
  std::size_t peak = 0;      // the peak since the process began, or since forget_peak()
  std::size_t of_files = 0;  // part of the current size: mostly code of libraries, which the kernel can reclaim
};

// Reads the counts of all threads. Any thread may call; concurrent allocations may or may not be included.
ResidentMemory resident_memory(const std::filesystem::path& root = "/");

// Resets the peak to the current size. Returns false if the kernel does not support it.
bool forget_peak();

// Limits the memory of this process, all mappings included: its private memory (RLIMIT_DATA) is limited to the bytes
// that the libraries and stacks leave. Throws B2001 if they leave nothing.
void limit_own_memory(std::size_t bytes);

}  // namespace ballast
