#include "kernels/runtime/host_limits.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/runtime/sizes.h"
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
  std::vector<fs::path> folders;  // folders of the process's group and all groups around it
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

std::optional<ResourceLimit> memory_of(const fs::path& folder, const Names& names) {
  const fs::path file = folder / names.limit;
  const std::optional<std::size_t> limit = read_number(file);
  if (!limit || *limit >= no_limit_v1) {
    return std::nullopt;
  }
  const std::size_t used = read_number(folder / names.used).value_or(0);
  const std::string statistics = read_text(folder / "memory.stat").value_or("");
  const std::size_t cache = number_after(statistics, names.inactive_cache).value_or(0) +
                            number_after(statistics, names.active_cache).value_or(0);
  return ResourceLimit{*limit, used - std::min(used, cache), file};
}

std::optional<ResourceLimit> tasks_of(const fs::path& folder) {
  const fs::path file = folder / "pids.max";
  const std::optional<std::size_t> limit = read_number(file);
  if (!limit) {
    return std::nullopt;
  }
  return ResourceLimit{*limit, read_number(folder / "pids.current").value_or(0), file};
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

// Returns the limit with the least left among the groups; nothing if none has a limit.
template <class Read, class Left>
auto least(const Place& place, const Read& read, const Left& left) -> decltype(read(place.folders[0])) {
  decltype(read(place.folders[0])) found;
  for (const fs::path& folder : place.folders) {
    const auto limit = read(folder);
    if (limit && (!found || std::invoke(left, *limit) < std::invoke(left, *found))) found = limit;
  }
  return found;
}

std::optional<std::size_t> soft_limit(decltype(RLIMIT_AS) resource) {
  rlimit limit{};
  const bool limited = getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return limited ? std::optional<std::size_t>(limit.rlim_cur) : std::nullopt;
}

// The call does not know how much of the page cache is available.
std::size_t total_without_proc() {
  struct sysinfo found {};
  ::sysinfo(&found);
  return static_cast<std::size_t>(found.totalram) * found.mem_unit;
}

std::optional<ResourceLimit> private_memory() {
  const std::optional<std::size_t> limit = soft_limit(RLIMIT_DATA);
  if (!limit) return {};
  return ResourceLimit{*limit, kibibytes_after(read_text("/proc/self/status").value_or(""), "VmData:").value_or(0)};
}

}  // namespace

std::optional<ResourceLimit> cgroup_memory(const fs::path& root) {
  const Place place = place_of("memory", root);
  const Names& names = place.version == 1 ? names_v1 : names_v2;
  return least(
      place, [&](const fs::path& folder) { return memory_of(folder, names); }, &ResourceLimit::left);
}

std::optional<double> cgroup_cores(const fs::path& root) {
  const Place place = place_of("cpu", root);
  return least(
      place, [&](const fs::path& folder) { return cores_of(folder, place.version); }, std::identity{});
}

std::optional<ResourceLimit> cgroup_tasks(const fs::path& root) {
  return least(place_of("pids", root), tasks_of, &ResourceLimit::left);
}

HostLimits read_host_limits(const std::filesystem::path& root, const Environment& environment) {
  const std::string meminfo = read_text(root / "proc/meminfo").value_or("");
  const std::size_t present = kibibytes_after(meminfo, "MemTotal:").value_or(total_without_proc());
  const std::size_t used = present - std::min(present, kibibytes_after(meminfo, "MemAvailable:").value_or(present));
  const std::optional<std::size_t> stated = environment.bytes("BALLAST_HOST_MEMORY");
  const std::size_t total = stated.value_or(present);
  return {.total_bytes = total,
          .available_bytes = total - std::min(total, used),
          .is_stated = stated.has_value(),
          .cgroup = cgroup_memory(root),
          .memlock_bytes = soft_limit(RLIMIT_MEMLOCK),
          .address_space_bytes = soft_limit(RLIMIT_AS),
          .private_memory = private_memory()};
}

void require_host_memory(std::size_t bytes, std::string_view owner, const HostLimits& limits) {
  const auto refuse = [&](std::string what, std::string available, std::string remedy) {
    fail(Code::host_memory, {.what = std::move(what),
                             .where = std::string(owner),
                             .needed = human_bytes(bytes),
                             .available = std::move(available),
                             .remedy = std::move(remedy)});
  };
  if (const auto& cgroup = limits.cgroup; cgroup && bytes > cgroup->left()) {
    refuse("cannot allocate host memory: the container's limit would be exceeded, and the process killed",
           fmt::format("{} of {} ({})", human_bytes(cgroup->left()), human_bytes(cgroup->limit), cgroup->file.string()),
           "Raise the container's memory limit (docker --memory, resources.limits.memory, sbatch --mem), or lower the "
           "memory budget.");
  }
  if (const auto& own = limits.private_memory; own && bytes > own->left()) {
    refuse("cannot allocate host memory: the limit on this process's private memory would be exceeded",
           fmt::format("{} of {} (RLIMIT_DATA, `ulimit -d`)", human_bytes(own->left()), human_bytes(own->limit)),
           "Raise the limit, or choose a lower tier or a smaller state format.");
  }
  if (bytes > limits.available_bytes) {
    refuse(
        "cannot allocate host memory: the host has too little free memory",
        fmt::format("{} of {} ({})", human_bytes(limits.available_bytes), human_bytes(limits.total_bytes),
                    limits.is_stated ? "BALLAST_HOST_MEMORY" : "MemAvailable in /proc/meminfo"),
        "Lower the memory budget, choose a smaller state format or a lower tier. Where memory grows as it is used, as in "
        "some virtual machines, set BALLAST_HOST_MEMORY to its size, such as 120GiB.");
  }
}

}  // namespace ballast
