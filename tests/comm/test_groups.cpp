#include "tests/comm/test_groups.h"

#include <catch2/catch.hpp>
#include <stdexcept>
#include <thread>

#include "tests/comm/process_groups.h"
#include "zero/comm/thread_communicator.h"

namespace ballast::testing {
namespace {

Failures run_threads(GroupShape shape, std::chrono::milliseconds timeout, const RankBody& body) {
  ThreadGroup group(shape.size, timeout, shape.ranks_per_host);
  Failures failures(shape.size);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < shape.size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto backend = kernels::cpu_backend({.threads = 1});
        body(*thread_communicator(group, rank, *backend));
      } catch (const std::exception& failure) {
        failures[rank] = failure.what();
        group.abort(failure.what());
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return failures;
}

Failures run_processes(HostTransport transport, GroupShape shape, std::chrono::milliseconds timeout,
                       const RankBody& body) {
  const ProcessGroupRig rig(shape, transport, timeout);
  return Processes(shape.size, [&](std::size_t rank) { rig.as_rank(rank, body); }).failures();
}

}  // namespace

std::vector<GroupKind> group_kinds() {
  std::vector<GroupKind> kinds{{"threads", run_threads}};
  for (const ProcessKind& kind : process_kinds()) {
    kinds.push_back({kind.name, std::bind_front(run_processes, kind.transport)});
  }
  return kinds;
}

void on_all_groups(GroupShape shape, const RankBody& body) {
  for (const GroupKind& kind : group_kinds()) {
    INFO(kind.name << ", " << shape.size << " ranks, " << shape.ranks_per_host << " for each host");
    CHECK(kind.run(shape, patient, body) == Failures(shape.size));
  }
}

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

}  // namespace ballast::testing
