#include "benchmarks/harness/own_memory.h"

#include <fstream>
#include <string>
#include <string_view>

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

}  // namespace ballast::benchmarks
