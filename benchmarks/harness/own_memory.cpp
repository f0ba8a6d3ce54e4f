#include "benchmarks/harness/own_memory.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <sys/resource.h>

#include <cerrno>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>

#include "kernels/runtime/sizes.h"
#include "kernels/runtime/system_files.h"

namespace ballast::benchmarks {

ResidentMemory resident_memory() {
  const std::string status = read_text("/proc/self/status").value_or("");
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

}  // namespace ballast::benchmarks
