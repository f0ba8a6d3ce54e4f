// Tests of processes that are killed or stopped: the others end, and name them.
#include <fmt/format.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <csignal>
#include <random>
#include <thread>

#include "kernels/runtime/buffer.h"
#include "tests/comm/process_groups.h"
#include "tests/comm/rank_values.h"
#include "tests/comm/signal.h"
#include "zero/comm/process_transport.h"
#include "zero/comm/shared_memory.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

constexpr std::size_t count = 300000;

// Reports when all ranks are at work, and then works until something fails.
void work_for_ever(Communicator& ranks, const Signal& start) {
  const Values mine = Values::of_rank(ranks.rank(), DType::bf16, count);
  MemoryAccounts accounts;
  const Buffer memory = allocate(accounts, {.bytes = ranks.size() * mine.view().bytes(),
                                            .owner = "all",
                                            .allocator = ranks.shared_memory()});  // null: private memory
  const View all = memory.view(DType::bf16);
  Values part(DType::fp32, count);
  const auto other = ranks.split(0);
  ranks.barrier();
  if (ranks.rank() == 0) start.give();
  while (true) {
    ranks.all_gather(mine.view(), all);
    other->reduce_scatter(all, part.view());
  }
}

std::size_t names_of_shared_memory() {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator("/dev/shm"), {}));
}

// Sends the signal to one rank in the middle of collectives, and returns the others' errors.
Failures failures_after_signal(const ProcessKind& kind, std::size_t victim, int signal,
                               std::chrono::milliseconds timeout) {
  constexpr std::size_t size = 4;
  const ProcessGroupRig rig(size, kind.transport, timeout);
  const Signal start;
  Processes processes(
      size, [&](std::size_t rank) { rig.as_rank(rank, [&](Communicator& ranks) { work_for_ever(ranks, start); }); });
  start.wait();
  std::mt19937 random(static_cast<unsigned>(victim));
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 30000));
  processes.send(victim, signal);
  Failures failures(size);
  for (std::size_t rank = 0; rank < size; ++rank) {
    if (rank != victim) failures[rank] = processes.failure(rank);
  }
  return failures;
}

}  // namespace

TEST_CASE("when a rank is killed, every other rank ends and names it") {
  const std::size_t names = names_of_shared_memory();
  for (const ProcessKind& kind : process_kinds()) {
    for (std::size_t victim = 0; victim < 4; ++victim) {
      INFO(kind.name << ", rank " << victim);
      const Failures failures = failures_after_signal(kind, victim, SIGKILL, patient);
      for (std::size_t rank = 0; rank < failures.size(); ++rank) {
        if (rank == victim) continue;
        CHECK_THAT(failures[rank], Contains("B3301") && Contains(fmt::format("rank {} (", victim)) && Contains("died"));
      }
      CHECK(names_of_shared_memory() == names);
    }
  }
}

TEST_CASE("when a rank is stopped, every other rank ends after the timeout and names it") {
  for (const ProcessKind& kind : process_kinds()) {
    for (const std::size_t victim : {0u, 2u}) {
      INFO(kind.name << ", rank " << victim);
      const Failures failures = failures_after_signal(kind, victim, SIGSTOP, std::chrono::milliseconds(700));
      for (std::size_t rank = 0; rank < failures.size(); ++rank) {
        if (rank == victim) continue;
        CHECK_THAT(failures[rank],
                   Contains("B330") && Contains(fmt::format("rank {} (", victim)) && Contains("did not arrive"));
      }
    }
  }
}

// Ranks 1 and 2 would report for whom they wait a minute later than rank 0.
TEST_CASE("a timeout names the rank at the end of a chain of waits in different groups of processes") {
  constexpr auto time_of_rank_0 = std::chrono::milliseconds(4000);  // connecting has this limit too
  for (const ProcessKind& kind : process_kinds()) {
    INFO(kind.name);
    const ProcessGroupRig rig(4, kind.transport, patient);
    const Signal others_ended;
    Processes processes(4, [&](std::size_t rank) {
      rig.as_rank(rank, rank == 0 ? time_of_rank_0 : patient, [&](Communicator& ranks) {
        const auto pair = ranks.split(rank / 2);          // {0, 1} and {2, 3}
        const auto middle = ranks.split((rank + 1) / 2);  // {1, 2}
        if (rank == 3) return others_ended.wait();
        (rank == 1 ? middle : pair)->barrier();
      });
    });
    for (const std::size_t rank : {0u, 1u, 2u}) {
      CHECK_THAT(processes.failure(rank), Contains("B330") && Contains("rank 3 (") && Contains("did not arrive"));
    }
    others_ended.give();
    CHECK(processes.failure(3).empty());
  }
}

// Rank 1 says that it has mapped the memory of rank 0, and dies before rank 0 has mapped its own.
TEST_CASE("a rank that dies before another has mapped its memory is named") {
  const TemporaryDirectory folder;
  Processes processes(2, [&](std::size_t rank) {
    FileStore store(folder.path());
    const auto job = std::make_shared<Job>(
        JobOptions{.launch = Launch{.rank = rank, .size = 2}, .store = &store, .timeout = patient});
    ProcessGroup group(job, rank);
    MemoryAccounts accounts;
    if (rank == 0) {
      shared_memory_transport(group, {.accounts = &accounts, .pages = std::make_shared<SharedPages>()});
      return;
    }
    SharedMemory mine = SharedMemory::make(100, "test");
    const std::string invitation = mine.invitation();
    mine.close_file();
    group.exchange_strings("memory", invitation);
    const std::thread answer([&] { group.exchange_strings("mapped", ""); });
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    ::_exit(0);
  });
  CHECK_THAT(processes.failure(0), Contains("B3301 rank 1 (") && Contains("died"));
}

// Rank 0's process has the hub, so no rank learns why the connection to the killed one was lost.
TEST_CASE("when rank 0 is stopped, a lost connection to another rank names rank 0") {
  if (!has_gloo()) return;  // ranks in shared memory have no connections to each other
  constexpr std::size_t size = 3;
  const ProcessGroupRig rig(size, HostTransport::gloo, patient);
  const Signal start;
  const Signal signals_sent;
  Processes processes(size, [&](std::size_t rank) {
    rig.as_rank(rank, [&](Communicator& ranks) {
      ranks.barrier();
      if (rank == 0) start.give();
      signals_sent.wait();
      ranks.barrier();
    });
  });
  start.wait();
  processes.send(0, SIGSTOP);
  processes.send(2, SIGKILL);
  CHECK(processes.failure(2) == "signal 9");
  signals_sent.give();
  CHECK_THAT(processes.failure(1), Contains("B330") && Contains("rank 0 (") && Contains("did not arrive"));
}
