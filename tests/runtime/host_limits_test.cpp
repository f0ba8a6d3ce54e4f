#include <ballast/error.h>

#include "kernels/runtime/host_limits.h"

#include <sys/resource.h>

#include <catch2/catch.hpp>

#include "tests/runtime/fake_root.h"
#include "tests/runtime/process.h"

using namespace ballast;

TEST_CASE("the limits of this machine are plausible") {
  const HostLimits limits = read_host_limits();
  CHECK(limits.total_bytes > std::size_t{64} << 20);
  CHECK(limits.available_bytes <= limits.total_bytes);
}

TEST_CASE("the container's limit refuses memory that the machine has") {
  FakeRoot root;
  root.with("proc/meminfo", "MemTotal:       1000 kB\nMemAvailable:    800 kB")
      .with("proc/self/cgroup", "0::/")
      .with("sys/fs/cgroup/memory.max", "10240")
      .with("sys/fs/cgroup/memory.current", "4096");
  const HostLimits limits = read_host_limits(root.path());
  CHECK(limits.available_bytes == 800 * 1024);
  CHECK_NOTHROW(require_host_memory(6144, "moments", limits));
  CHECK_THROWS_AS(require_host_memory(6145, "moments", limits), ResourceError);
  CHECK_THROWS_WITH(require_host_memory(8192, "moments", limits),
                    Catch::Contains("B2001") && Catch::Contains("moments") && Catch::Contains("8 KiB") &&
                        Catch::Contains("6 KiB of 10 KiB") && Catch::Contains("memory.max") &&
                        Catch::Contains("docker --memory"));
}

TEST_CASE("without a container's limit, the machine's available memory is the limit") {
  FakeRoot root;
  root.with("proc/meminfo", "MemTotal:       1000 kB\nMemAvailable:    800 kB");
  const HostLimits limits = read_host_limits(root.path());
  CHECK_NOTHROW(require_host_memory(800 * 1024, "moments", limits));
  CHECK_THROWS_WITH(require_host_memory(801 * 1024, "moments", limits),
                    Catch::Contains("801 KiB") && Catch::Contains("800 KiB of 1000 KiB (MemAvailable"));
}

TEST_CASE("a memory that grows as it is used has the size that the environment states") {
  FakeRoot root;
  root.with("proc/meminfo", "MemTotal:       1000 kB\nMemAvailable:    800 kB");
  const auto limits = [&](const char* stated) {
    return read_host_limits(root.path(), Environment([=](const std::string& name) {
                              CHECK(name == "BALLAST_HOST_MEMORY");
                              return std::optional<std::string>(stated);
                            }));
  };
  CHECK(limits("10000KiB").total_bytes == 10000 * 1024);
  CHECK_NOTHROW(require_host_memory(9800 * 1024, "moments", limits("10000KiB")));
  CHECK_THROWS_WITH(require_host_memory(9801 * 1024, "moments", limits("10000KiB")),
                    Catch::Contains("9.57 MiB of 9.766 MiB (BALLAST_HOST_MEMORY"));
  CHECK(limits("100KiB").available_bytes == 0);  // less than is in use
  CHECK(limits("").available_bytes == 800 * 1024);
  CHECK_THROWS_WITH(limits("120G"), Catch::Contains("B1006") && Catch::Contains("BALLAST_HOST_MEMORY=\"120G\""));
  CHECK_THROWS_WITH(require_host_memory(801 * 1024, "moments", limits("")),
                    Catch::Contains("set BALLAST_HOST_MEMORY to its size"));
}

TEST_CASE("where /proc is hidden, the kernel's call tells the size of the memory") {
  const FakeRoot hidden;
  const HostLimits limits = read_host_limits(hidden.path());
  CHECK(limits.total_bytes / 2 < read_host_limits().total_bytes);
  CHECK(read_host_limits().total_bytes <= limits.total_bytes);
  CHECK(limits.available_bytes == limits.total_bytes);
}

TEST_CASE("rlimits are read") {
  CHECK(in_child([] {
          const rlimit memlock{1 << 16, 1 << 16};
          setrlimit(RLIMIT_MEMLOCK, &memlock);
          return read_host_limits().memlock_bytes == std::size_t{1 << 16} ? 0 : 1;
        }) == 0);
}

TEST_CASE("an allocation above the limit on private memory is refused before the kernel does") {
  HostLimits limits{.total_bytes = 1 << 30, .available_bytes = 1 << 30};
  limits.private_memory = ResourceLimit{.limit = 8192, .used = 2048};
  CHECK_NOTHROW(require_host_memory(6144, "moments", limits));
  CHECK_THROWS_WITH(require_host_memory(6145, "moments", limits),
                    Catch::Contains("B2001") && Catch::Contains("moments") && Catch::Contains("6 KiB of 8 KiB") &&
                        Catch::Contains("RLIMIT_DATA"));
}
