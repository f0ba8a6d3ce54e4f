// What the container's control group (version 1 or 2) allows this process. Any thread may ask.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>

namespace ballast {

struct CgroupMemory {
  std::size_t limit_bytes;
  std::size_t used_bytes;      // without the file cache, which the kernel drops before it kills anyone
  std::filesystem::path file;  // where the limit stands

  std::size_t available_bytes() const { return limit_bytes > used_bytes ? limit_bytes - used_bytes : 0; }
};

// Groups are nested and each may have a limit: this is the one with the least left. None: no limit.
std::optional<CgroupMemory> cgroup_memory(const std::filesystem::path& root = "/");

// The CPU quota in cores, such as 1.5; the smallest of the nested groups. None: no quota.
std::optional<double> cgroup_cores(const std::filesystem::path& root = "/");

struct CgroupTasks {
  std::size_t limit;
  std::size_t used;
  std::filesystem::path file;  // where the limit stands

  std::size_t left() const { return limit > used ? limit - used : 0; }
};

// The limit on processes and threads; of the nested groups, the one with the least left. None: no limit.
std::optional<CgroupTasks> cgroup_tasks(const std::filesystem::path& root = "/");

}  // namespace ballast
