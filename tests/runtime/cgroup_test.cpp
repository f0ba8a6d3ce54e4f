#include "kernels/runtime/host_limits.h"

#include <catch2/catch.hpp>

#include "kernels/runtime/machine.h"
#include "tests/runtime/fake_root.h"

using namespace ballast;

TEST_CASE("cgroup v2: the limit with the least left counts, and the file cache counts as free") {
  FakeRoot root;
  root.with("proc/self/cgroup", "0::/pod/container")
      .with("sys/fs/cgroup/pod/container/memory.max", "1000")
      .with("sys/fs/cgroup/pod/container/memory.current", "500")
      .with("sys/fs/cgroup/pod/container/memory.stat", "anon 200\ninactive_file 250\nactive_file 50\n")
      .with("sys/fs/cgroup/pod/memory.max", "2000")
      .with("sys/fs/cgroup/pod/memory.current", "1900");
  const auto memory = cgroup_memory(root.path());
  REQUIRE(memory);
  CHECK(memory->limit == 2000);
  CHECK(memory->left() == 100);
  CHECK(memory->file == root.path() / "sys/fs/cgroup/pod/memory.max");

  root.with("sys/fs/cgroup/pod/memory.max", "max");
  CHECK(cgroup_memory(root.path())->left() == 800);
  root.with("sys/fs/cgroup/pod/container/memory.max", "max");
  CHECK_FALSE(cgroup_memory(root.path()));
}

TEST_CASE("cgroup v2: a container sees its own group as the root") {
  FakeRoot root;
  root.with("proc/self/cgroup", "0::/")
      .with("sys/fs/cgroup/memory.max", "1000")
      .with("sys/fs/cgroup/memory.current", "1200")
      .with("sys/fs/cgroup/cpu.max", "150000 100000");
  CHECK(cgroup_memory(root.path())->left() == 0);
  CHECK(cgroup_cores(root.path()) == 1.5);
  CHECK(usable_cores(root.path()) <= 2);
  root.with("proc/self/cgroup", "0::/../elsewhere");
  CHECK(cgroup_memory(root.path())->limit == 1000);
}

TEST_CASE("cgroup v1: each controller has its own tree") {
  FakeRoot root;
  root.with("proc/self/cgroup", "9:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/")
      .with("sys/fs/cgroup/memory/memory.limit_in_bytes", "4096")  // the host's path of the group does not exist here
      .with("sys/fs/cgroup/memory/memory.usage_in_bytes", "1024")
      .with("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 24\ntotal_active_file 0\n")
      .with("sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us", "50000")
      .with("sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us", "100000")
      .with("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
      .with("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  CHECK(cgroup_memory(root.path())->left() == 4096 - 1000);
  CHECK(cgroup_cores(root.path()) == 0.5);
  CHECK(usable_cores(root.path()) == 1);

  root.with("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");  // how version 1 writes "none"
  CHECK_FALSE(cgroup_memory(root.path()));
}

TEST_CASE("without control groups there is no limit") {
  const FakeRoot root;
  CHECK_FALSE(cgroup_memory(root.path()));
  CHECK_FALSE(cgroup_cores(root.path()));
  CHECK(usable_cores(root.path()) == allowed_cores().size());
}
