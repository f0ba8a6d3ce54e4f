#include "kernels/runtime/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "kernels/runtime/cores.h"
#include "kernels/runtime/numa.h"
#include "kernels/runtime/sizes.h"
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

std::string limit(const std::optional<std::size_t>& bytes) { return bytes ? human_bytes(*bytes) : "none"; }

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

std::string describe(const ThisMachine& machine) {
  const HostLimits& memory = machine.memory;
  std::string text =
      fmt::format("cpu      {}, {} of {} cores{}, {} NUMA node{}\n", machine.cpu, machine.cores, machine.cores_of_host,
                  machine.core_quota ? fmt::format(" (quota {:.4g})", *machine.core_quota) : "", machine.numa_nodes,
                  machine.numa_nodes == 1 ? "" : "s");
  text += fmt::format("memory   {} of {} available\n", human_bytes(memory.available_bytes),
                      human_bytes(memory.total_bytes));
  if (memory.cgroup) {
    text += fmt::format("         {} of {} left in the container\n", human_bytes(memory.cgroup->available_bytes()),
                        human_bytes(memory.cgroup->limit_bytes));
  }
  text += fmt::format("limits   memlock {}, address space {}\n", limit(memory.memlock_bytes),
                      limit(memory.address_space_bytes));
  for (const Gpu& gpu : machine.gpus) {
    text += fmt::format("gpu      {}, {}, compute capability {}.{}, at {}\n", gpu.name, human_bytes(gpu.memory_bytes),
                        gpu.major, gpu.minor, gpu.pci);
  }
  if (machine.gpus.empty()) {
    text += fmt::format("gpu      none: {}\n", machine.no_gpu_because);
  }
  return text;
}

}  // namespace ballast
