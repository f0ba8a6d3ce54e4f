#include "kernels/runtime/host_limits.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>
#include <system_error>

#include <cerrno>
#include <fstream>
#include <string>

#include "kernels/runtime/sizes.h"
#include "kernels/runtime/system_files.h"

namespace ballast {

namespace {

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

std::optional<PrivateMemory> private_memory() {
  const std::optional<std::size_t> limit = soft_limit(RLIMIT_DATA);
  if (!limit) return {};
  return PrivateMemory{*limit, kibibytes_after(read_text("/proc/self/status").value_or(""), "VmData:").value_or(0)};
}

}  // namespace

HostLimits read_host_limits(const std::filesystem::path& root) {
  const std::string meminfo = read_text(root / "proc/meminfo").value_or("");
  const std::size_t total = kibibytes_after(meminfo, "MemTotal:").value_or(total_without_proc());
  return {.total_bytes = total,
          .available_bytes = kibibytes_after(meminfo, "MemAvailable:").value_or(total),
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
  if (const auto& cgroup = limits.cgroup; cgroup && bytes > cgroup->available_bytes()) {
    refuse("cannot allocate host memory: the container's limit would be exceeded, and the process killed",
           fmt::format("{} of {} ({})", human_bytes(cgroup->available_bytes()), human_bytes(cgroup->limit_bytes),
                       cgroup->file.string()),
           "Raise the container's memory limit (docker --memory, resources.limits.memory, sbatch --mem), or lower the "
           "memory budget.");
  }
  if (const auto& own = limits.private_memory; own && bytes > own->available_bytes()) {
    refuse("cannot allocate host memory: the limit on this process's private memory would be exceeded",
           fmt::format("{} of {} (RLIMIT_DATA, `ulimit -d`)", human_bytes(own->available_bytes()),
                       human_bytes(own->limit_bytes)),
           "Raise the limit, or choose a lower tier or a smaller state format.");
  }
  if (bytes > limits.available_bytes) {
    refuse("cannot allocate host memory: the host has too little free memory",
           fmt::format("{} of {} (MemAvailable in /proc/meminfo)", human_bytes(limits.available_bytes),
                       human_bytes(limits.total_bytes)),
           "");
  }
}

ResidentMemory resident_memory(const std::filesystem::path& root) {
  const std::string status = read_text(root / "proc/self/status").value_or("");
  const auto bytes = [&](std::string_view key) { return kibibytes_after(status, key).value_or(0); };
  return {.now = bytes("VmRSS:"), .peak = bytes("VmHWM:"), .of_files = bytes("RssFile:")};
}

bool forget_peak() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5" << std::flush;  // proc(5): the peak alone
  return file.good();
}

// The kernel counts private writable memory, resident or not, against RLIMIT_DATA. All other mappings are assumed to be
// resident, so that the sum cannot exceed the requested limit.
void limit_own_memory(std::size_t bytes) {
  const std::string status = read_text("/proc/self/status").value_or("");
  const std::size_t mapped = kibibytes_after(status, "VmSize:").value_or(0);
  const std::size_t own = kibibytes_after(status, "VmData:").value_or(0);
  require(bytes > mapped, Code::host_memory, [&] {
    return Problem{.what = "cannot limit this process's memory: it already holds more",
                   .needed = fmt::format("more than {}", human_bytes(mapped)),
                   .available = human_bytes(bytes)};
  });
  const rlim_t limit = bytes - (mapped - own);
  const rlimit both{limit, limit};
  require(setrlimit(RLIMIT_DATA, &both) == 0, Code::host_memory, [&] {
    return Problem{
        .what = fmt::format("cannot limit this process's memory: {}", std::generic_category().message(errno)),
        .where = "RLIMIT_DATA",
        .needed = human_bytes(limit)};
  });
}

}  // namespace ballast
