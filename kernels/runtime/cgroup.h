// The limits of the container's control group (version 1 or 2). Any thread may call.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>

namespace ballast {

struct CgroupMemory {
  std::size_t limit_bytes;
  std::size_t used_bytes;      // without the file cache, which the kernel drops before it kills a process
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

}  // namespace ballast
