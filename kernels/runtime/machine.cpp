#include "kernels/runtime/machine.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <iterator>

#include "kernels/runtime/system_files.h"

namespace ballast {

std::vector<int> allowed_cores() {
  std::array<cpu_set_t, 8> mask{};  // room for 8,192 cores
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof(mask), mask.data()) == 0) {
    for (std::size_t core = 0; core < mask.size() * CPU_SETSIZE; ++core) {
      if (CPU_ISSET_S(core, sizeof(mask), mask.data())) {
        cores.push_back(static_cast<int>(core));
      }
    }
  }
  return cores;
}

std::size_t usable_cores(const std::filesystem::path& root) {
  const std::size_t allowed = std::max<std::size_t>(allowed_cores().size(), 1);
  const std::optional<double> quota = cgroup_cores(root);
  return quota ? std::clamp<std::size_t>(static_cast<std::size_t>(std::ceil(*quota)), 1, allowed) : allowed;
}

namespace {

constexpr std::uint64_t shortest = 100'000;  // nanoseconds; the kernel allows no less

// The kernel's sched_attr in its first size. Headers of the kernel and of C libraries older than 2.41 define types twice.
struct Scheduling {
  std::uint32_t size = sizeof(Scheduling);
  std::uint32_t policy = 0;
  std::uint64_t flags = 0;
  std::int32_t nice = 0;
  std::uint32_t priority = 0;
  std::uint64_t slice = 0;  // nanoseconds
  std::uint64_t deadline = 0;
  std::uint64_t period = 0;
};
static_assert(sizeof(Scheduling) == 48);

constexpr std::uint64_t reset_in_children = 1;  // SCHED_FLAG_RESET_ON_FORK

// Threads with another policy, such as SCHED_FIFO, keep it as it is.
void use_slices_of(std::uint64_t nanoseconds, std::uint64_t flags = 0) {
  Scheduling scheduling;
  const bool is_known = ::syscall(SYS_sched_getattr, 0, &scheduling, sizeof scheduling, 0) == 0;
  if (!is_known || scheduling.policy != SCHED_OTHER) return;
  scheduling.slice = nanoseconds;
  scheduling.flags |= flags;
  ::syscall(SYS_sched_setattr, 0, &scheduling, 0);
}

std::uint64_t slices_of_this_thread() {
  Scheduling scheduling;
  return ::syscall(SYS_sched_getattr, 0, &scheduling, sizeof scheduling, 0) == 0 ? scheduling.slice : 0;
}

const char* const nodes_folder = "sys/devices/system/node";

std::vector<int> cores_of_node(std::string_view node, const std::filesystem::path& root) {
  return parse_list(read_text(root / nodes_folder / fmt::format("node{}", node) / "cpulist").value_or(""));
}

std::vector<int> nodes_with_memory(const std::filesystem::path& root) {
  return parse_list(read_text(root / nodes_folder / "has_memory").value_or(""));
}

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

std::vector<int> cores_near(std::string_view pci, const std::filesystem::path& root) {
  std::string address(pci);  // CUDA writes it with capital letters
  std::ranges::transform(address, address.begin(), [](unsigned char letter) { return std::tolower(letter); });
  const std::string node = read_text(root / "sys/bus/pci/devices" / address / "numa_node").value_or("-1");
  const std::vector<int> allowed = allowed_cores();
  const std::vector<int> of_node = cores_of_node(node, root);
  std::vector<int> near;
  std::ranges::set_intersection(allowed, of_node, std::back_inserter(near));
  return near.empty() ? allowed : near;
}

void use_short_time_slices() { use_slices_of(shortest, reset_in_children); }

ShortTimeSlices::ShortTimeSlices() : before_(slices_of_this_thread()) { use_slices_of(shortest); }

ShortTimeSlices::~ShortTimeSlices() { use_slices_of(before_); }

std::size_t numa_node_count(const std::filesystem::path& root) {
  return std::max<std::size_t>(nodes_with_memory(root).size(), 1);
}

std::vector<int> nodes_of_cores(std::span<const int> cores, const std::filesystem::path& root) {
  std::vector<int> nodes = nodes_with_memory(root);
  if (nodes.size() < 2) {
    return {};
  }
  std::erase_if(nodes, [&](int node) {
    const std::vector<int> of_node = cores_of_node(std::to_string(node), root);
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
