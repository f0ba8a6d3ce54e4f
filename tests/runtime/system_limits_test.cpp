#include <ballast/error.h>

#include "kernels/runtime/system_resources.h"

#include <catch2/catch.hpp>
#include <cerrno>

#include "kernels/runtime/host_limits.h"
#include "kernels/runtime/system_files.h"
#include "tests/limited_child.h"
#include "tests/runtime/fake_root.h"
#include "tests/skip.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

TEST_CASE("a thread that is started runs") {
  bool ran = false;
  start_thread("a test", [&] { ran = true; }).join();
  CHECK(ran);
}

TEST_CASE("the error for a refused thread names its purpose and the limits") {
  if (::geteuid() != 0) return skip("becoming another user needs root");
  const std::string output = in_a_child([]() -> std::string {
    const std::string threads = std::to_string(entries_of("/proc/self/task"));  // ThreadSanitizer has one of its own
    allow_threads(0);
    try {
      start_thread("a test", [] {}).join();
    } catch (const Error& error) {
      return threads + " threads: " + error.what();
    }
    return "started";
  });
  const std::string threads = output.substr(0, output.find(' '));
  CHECK_THAT(output, Contains("B2401") &&
                         Contains("cannot start a thread for a test: Resource temporarily unavailable") &&
                         Contains("RLIMIT_NPROC is " + threads + " (`ulimit -u`)") &&
                         Contains("this process has " + threads + " threads"));
}

TEST_CASE("of nested cgroups' limits on threads, the one with the least left is named") {
  FakeRoot root;
  CHECK_FALSE(cgroup_tasks(root.path()));
  root.with("proc/self/cgroup", "0::/pod/container")
      .with("sys/fs/cgroup/pod/container/pids.max", "max")
      .with("sys/fs/cgroup/pod/pids.max", "100")
      .with("sys/fs/cgroup/pod/pids.current", "98")
      .with("proc/sys/kernel/threads-max", "5000")
      .with("proc/self/status", "Name:\tit\nThreads:\t17\n");
  CHECK(cgroup_tasks(root.path())->left() == 2);
  CHECK_THAT(limits_behind(EAGAIN, root.path()),
             Contains("pids.max is 100, 98 in use (" + (root.path() / "sys/fs/cgroup/pod/pids.max").string() + ")") &&
                 Contains("kernel.threads-max is 5000") && Contains("this process has 17 threads"));
  root.with("sys/fs/cgroup/pod/container/pids.max", "20").with("sys/fs/cgroup/pod/container/pids.current", "21");
  CHECK(cgroup_tasks(root.path())->limit == 20);
  CHECK(limits_behind(EIO, root.path()).empty());
}

TEST_CASE("a system file that cannot be opened for lack of descriptors is not taken for missing") {
  if (!descriptors_can_be_refused) return skip(no_refused_descriptors);
  const std::string output = in_a_child([]() -> std::string {
    allow_descriptors(0);
    return read_text("/proc/self/status") ? "read" : "not there";
  });
  CHECK_THAT(output, Contains("B2401") && Contains("cannot read /proc/self/status: Too many open files") &&
                         Contains("RLIMIT_NOFILE is "));
}

TEST_CASE("limits on threads that cannot be read for lack of descriptors are left out") {
  if (!descriptors_can_be_refused) return skip(no_refused_descriptors);
  const std::string output = in_a_child([]() -> std::string {
    allow_descriptors(0);
    return limits_behind(EAGAIN);
  });
  CHECK_THAT(output, Catch::StartsWith("RLIMIT_NPROC is ") && !Contains("this process has"));
}
