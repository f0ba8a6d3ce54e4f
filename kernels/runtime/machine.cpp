#include "kernels/runtime/machine.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "kernels/runtime/cores.h"
#include "kernels/runtime/system_files.h"

namespace ballast {

namespace {

const char* const nodes_folder = "sys/devices/system/node";

std::vector<int> nodes_with_memory(const std::filesystem::path& root) {
  return parse_list(read_text(root / nodes_folder / "has_memory").value_or(""));
}

}  // namespace

std::size_t numa_node_count(const std::filesystem::path& root) {
  return std::max<std::size_t>(nodes_with_memory(root).size(), 1);
}

std::vector<int> nodes_of_cores(std::span<const int> cores, const std::filesystem::path& root) {
  std::vector<int> nodes = nodes_with_memory(root);
  if (nodes.size() < 2) {
    return {};
  }
  std::erase_if(nodes, [&](int node) {
    const auto list = root / nodes_folder / ("node" + std::to_string(node)) / "cpulist";
    const std::vector<int> of_node = parse_list(read_text(list).value_or(""));
    return std::ranges::find_first_of(of_node, cores) == of_node.end();
  });
  return nodes;
}

bool place_on_nodes(std::byte* pages, std::size_t bytes, std::span<const int> nodes) {
  if (nodes.empty() || bytes == 0) {
    return true;
  }
  constexpr std::size_t word_bits = 8 * sizeof(unsigned long);
  std::array<unsigned long, 16> mask{};
  constexpr std::size_t most_nodes = word_bits * mask.size();  // the kernel's own limit
  for (const int node : nodes) {
    require(node >= 0 && static_cast<std::size_t>(node) < most_nodes, Code::bad_argument, [&] {
      return Problem{.what = fmt::format("cannot place memory on NUMA node {}: there is no such node", node),
                     .needed = fmt::format("a node from 0 to {}", most_nodes - 1)};
    });
    const auto bit = static_cast<std::size_t>(node);
    mask[bit / word_bits] |= 1UL << (bit % word_bits);
  }
  const int policy = nodes.size() == 1 ? MPOL_PREFERRED : MPOL_INTERLEAVE;
  return syscall(SYS_mbind, pages, bytes, policy, mask.data(), mask.size() * word_bits + 1, 0) == 0;
}

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
