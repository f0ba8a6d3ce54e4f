#include <ballast/error.h>

#include "kernels/runtime/machine.h"

#include <sched.h>

#include <array>
#include <catch2/catch.hpp>

#include "kernels/runtime/host_pages.h"
#include "kernels/runtime/system_files.h"
#include "tests/runtime/fake_root.h"
#include "tests/runtime/process.h"
#include "tests/skip.h"

using namespace ballast;

namespace {

FakeRoot& two_nodes(FakeRoot& root) {
  return root.with("sys/devices/system/node/has_memory", "0-1")
      .with("sys/devices/system/node/node0/cpulist", "0-3,8")
      .with("sys/devices/system/node/node1/cpulist", "4-7");
}

}  // namespace

TEST_CASE("the kernel's lists and numbers are parsed") {
  CHECK(parse_list("0-2,8") == std::vector<int>{0, 1, 2, 8});
  CHECK(parse_list("").empty());
  CHECK(leading_number("  24 kB") == 24);
  CHECK_FALSE(leading_number("max"));
  CHECK_FALSE(leading_number("-1"));
  CHECK(number_after("MemTotal: 5 kB\nMemFree: 3 kB", "MemFree:") == 3);
  CHECK_FALSE(number_after("MemTotal: 5 kB", "MemAvailable:"));
  CHECK_FALSE(read_text("/nowhere/at/all"));
}

TEST_CASE("memory goes to the nodes of the cores that use it") {
  FakeRoot root;
  two_nodes(root);
  CHECK(numa_node_count(root.path()) == 2);
  CHECK(nodes_of_cores(std::array{8}, root.path()) == std::vector<int>{0});
  CHECK(nodes_of_cores(std::array{5, 6}, root.path()) == std::vector<int>{1});
  CHECK(nodes_of_cores(std::array{3, 4}, root.path()) == std::vector<int>{0, 1});
  root.with("sys/devices/system/node/has_memory", "0");
  CHECK(nodes_of_cores(std::array{3, 4}, root.path()).empty());
}

TEST_CASE("the cores near a GPU are those of its memory node") {
  const std::vector<int> allowed = allowed_cores();
  FakeRoot root;
  const auto cores_of_node = [&](const std::string& cores) {
    root.with("sys/devices/system/node/node1/cpulist", cores);
    return cores_near("0000:3B:00.0", root.path());
  };
  CHECK(cores_near("0000:3B:00.0", root.path()) == allowed);  // nothing is known of the device
  root.with("sys/bus/pci/devices/0000:3b:00.0/numa_node", "1");
  CHECK(cores_of_node("8190-8191") == allowed);  // this process may use none of them
  CHECK(cores_of_node(std::to_string(allowed.back())) == std::vector{allowed.back()});
  root.with("sys/bus/pci/devices/0000:3b:00.0/numa_node", "-1");
  CHECK(cores_near("0000:3B:00.0", root.path()) == allowed);
  CHECK(cores_near("", root.path()) == allowed);
}

TEST_CASE("pages can be placed on a node that exists") {
  const HostPages pages = map_host_pages(8192, "test");
  CHECK(place_on_nodes(pages.get(), 8192, {}));
  if (!place_on_nodes(pages.get(), 8192, std::array{0})) {
    skip("this container forbids mbind");
  }
  CHECK_FALSE(place_on_nodes(pages.get(), 8192, std::array{1000}));
  CHECK_THROWS_AS(place_on_nodes(pages.get(), 8192, std::array{1024}), UsageError);
  CHECK_THROWS_AS(place_on_nodes(pages.get(), 8192, std::array{-1}), UsageError);
}

TEST_CASE("the affinity mask decides how many cores there are, OMP_NUM_THREADS does not") {
  CHECK(in_child([] {
          setenv("OMP_NUM_THREADS", "7", 1);
          const int core = allowed_cores().back();
          cpu_set_t mask;
          CPU_ZERO(&mask);
          CPU_SET(static_cast<std::size_t>(core), &mask);
          sched_setaffinity(0, sizeof(mask), &mask);
          return usable_cores() == 1 && allowed_cores() == std::vector{core} ? 0 : 1;
        }) == 0);
}

TEST_CASE("this machine is found") {
  const ThisMachine machine = detect_machine();
  CHECK(machine.cores >= 1);
  CHECK(machine.cores <= machine.cores_of_host);
  CHECK(machine.gpus.empty() == !machine.no_gpu_because.empty());
}

TEST_CASE("a machine is found from its system files") {
  FakeRoot root;
  two_nodes(root)
      .with("proc/cpuinfo", "processor\t: 0\nmodel name\t: Imagined 9000\nflags\t: fast")
      .with("proc/meminfo", "MemTotal:       1048576 kB\nMemAvailable:    524288 kB")
      .with("proc/self/cgroup", "0::/")
      .with("sys/fs/cgroup/memory.max", "268435456")
      .with("sys/fs/cgroup/cpu.max", "100000 100000")
      .with("sys/devices/system/cpu/online", "0-8");
  const ThisMachine machine = detect_machine(root.path());
  CHECK(machine.cpu == "Imagined 9000");
  CHECK(machine.cores == 1);
  CHECK(machine.cores_of_host == 9);
  CHECK(machine.core_quota == 1.0);
  CHECK(machine.numa_nodes == 2);
  CHECK(machine.memory.total_bytes == std::size_t{1} << 30);
  CHECK(machine.memory.available_bytes == std::size_t{512} << 20);
  REQUIRE(machine.memory.cgroup.has_value());
  CHECK(machine.memory.cgroup->limit == std::size_t{256} << 20);
}
