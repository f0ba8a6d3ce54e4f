#include "kernels/runtime/cgroup.h"

#include <algorithm>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/runtime/system_files.h"

namespace ballast {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t no_limit_v1 = std::size_t{1} << 62;  // version 1 writes LONG_MAX rounded down to a page

// The file names of one version.
struct Names {
  const char* limit;
  const char* used;
  const char* inactive_cache;
  const char* active_cache;
};
constexpr Names names_v1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ",
                         "total_active_file "};
constexpr Names names_v2{"memory.max", "memory.current", "inactive_file ", "active_file "};

struct Place {
  int version;
  std::vector<fs::path> folders;  // of the process's group and all groups around it
};

// A container often shows its own group as the mount's root while /proc names the host's path. So the root is always in
// the list, and a folder that does not exist is skipped when it is read.
std::vector<fs::path> upwards(const fs::path& mount, std::string_view group) {
  std::vector<fs::path> folders;
  fs::path relative = group.find("..") == std::string_view::npos ? fs::path(group).relative_path() : fs::path();
  for (; !relative.empty(); relative = relative.parent_path()) {
    folders.push_back(mount / relative);
  }
  folders.push_back(mount);
  return folders;
}

bool lists(std::string_view controllers, std::string_view controller) {
  std::istringstream words{std::string(controllers)};
  for (std::string word; std::getline(words, word, ',');) {
    if (word == controller) {
      return true;
    }
  }
  return false;
}

// Lines of /proc/self/cgroup: "4:memory:/a/b" (version 1, by controller) and "0::/a/b" (version 2).
Place place_of(std::string_view controller, const fs::path& root) {
  const fs::path mount = root / "sys/fs/cgroup";
  Place found{2, {mount}};
  std::istringstream lines(read_text(root / "proc/self/cgroup").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const std::string_view controllers = std::string_view(line).substr(first + 1, second - first - 1);
    const std::string_view group = std::string_view(line).substr(second + 1);
    if (lists(controllers, controller)) {
      return {1, upwards(mount / controller, group)};
    }
    if (controllers.empty()) {
      found = {2, upwards(mount, group)};
    }
  }
  return found;
}

std::optional<CgroupMemory> memory_of(const fs::path& folder, const Names& names) {
  const fs::path file = folder / names.limit;
  const std::optional<std::size_t> limit = read_number(file);
  if (!limit || *limit >= no_limit_v1) {
    return std::nullopt;
  }
  const std::size_t used = read_number(folder / names.used).value_or(0);
  const std::string statistics = read_text(folder / "memory.stat").value_or("");
  const std::size_t cache = number_after(statistics, names.inactive_cache).value_or(0) +
                            number_after(statistics, names.active_cache).value_or(0);
  return CgroupMemory{*limit, used - std::min(used, cache), file};
}

std::optional<CgroupTasks> tasks_of(const fs::path& folder) {
  const fs::path file = folder / "pids.max";
  const std::optional<std::size_t> limit = read_number(file);
  if (!limit) {
    return std::nullopt;
  }
  return CgroupTasks{*limit, read_number(folder / "pids.current").value_or(0), file};
}

std::optional<double> cores_of(const fs::path& folder, int version) {
  std::optional<std::size_t> quota;
  std::optional<std::size_t> period;
  if (version == 1) {
    quota = read_number(folder / "cpu.cfs_quota_us");
    period = read_number(folder / "cpu.cfs_period_us");
  } else if (const auto text = read_text(folder / "cpu.max")) {  // "150000 100000" or "max 100000"
    quota = leading_number(*text);
    period = number_after(*text, text->substr(0, text->find(' ')));
  }
  if (!quota || !period || *period == 0) {
    return std::nullopt;
  }
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

}  // namespace

std::optional<CgroupMemory> cgroup_memory(const fs::path& root) {
  const Place place = place_of("memory", root);
  std::optional<CgroupMemory> tightest;
  for (const fs::path& folder : place.folders) {
    const auto memory = memory_of(folder, place.version == 1 ? names_v1 : names_v2);
    if (memory && (!tightest || memory->available_bytes() < tightest->available_bytes())) {
      tightest = memory;
    }
  }
  return tightest;
}

std::optional<double> cgroup_cores(const fs::path& root) {
  const Place place = place_of("cpu", root);
  std::optional<double> fewest;
  for (const fs::path& folder : place.folders) {
    const auto cores = cores_of(folder, place.version);
    if (cores && (!fewest || *cores < *fewest)) {
      fewest = cores;
    }
  }
  return fewest;
}

std::optional<CgroupTasks> cgroup_tasks(const fs::path& root) {
  const Place place = place_of("pids", root);
  std::optional<CgroupTasks> tightest;
  for (const fs::path& folder : place.folders) {
    const auto tasks = tasks_of(folder);
    if (tasks && (!tightest || tasks->left() < tightest->left())) {
      tightest = tasks;
    }
  }
  return tightest;
}

}  // namespace ballast
