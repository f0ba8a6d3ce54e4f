#include "kernels/runtime/machine.h"

#include <algorithm>
#include <string_view>

#include "kernels/runtime/cores.h"
#include "kernels/runtime/numa.h"
#include "kernels/runtime/system_files.h"

namespace ballast {
namespace {

// x86 writes "model name : ..."; ARM has no name there, only numbers.
std::string cpu_name(const std::filesystem::path& root) {
  const std::string text = read_text(root / "proc/cpuinfo").value_or("");
  const std::size_t key = text.find("model name");
  const std::size_t colon = text.find(": ", key);
  if (key == std::string::npos || colon == std::string::npos) {
    return "unknown";
  }
  return text.substr(colon + 2, text.find('\n', colon) - colon - 2);
}

}  // namespace

ThisMachine detect_machine(const std::filesystem::path& root) {
  ThisMachine machine{.cpu = cpu_name(root),
                      .cores = usable_cores(root),
                      .core_quota = cgroup_cores(root),
                      .numa_nodes = numa_node_count(root),
                      .memory = read_host_limits(root),
                      .gpus = device::list(),
                      .no_gpu_because = device::absence()};
  const std::string online = read_text(root / "sys/devices/system/cpu/online").value_or("");
  machine.cores_of_host = std::max(parse_list(online).size(), machine.cores);
  return machine;
}

}  // namespace ballast
