// Tests of ranks that share a drive: how far one gets before another, and that no rank waits for one that has died or left.
#include "zero/comm/drive_peers.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <csignal>
#include <thread>

#include "tests/comm/process_groups.h"
#include "tests/comm/signal.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

constexpr std::size_t records = 80;                                               // of a step
constexpr std::size_t most_ahead = records / DrivePeers::rounds_of_step * 5 / 4;  // a round, and a quarter of one

constexpr std::chrono::hours no_end{1};  // of patience: a test that should not have to wait hangs if it does
constexpr std::uint64_t drive = 7;

void move_records(DrivePeers& peers, std::size_t count) {
  for (std::size_t record = 0; record < count; ++record)
    peers.begin_record(0);
}

}  // namespace

TEST_CASE("of ranks that share a drive, none is more than a round ahead of the slowest") {
  auto ranks = thread_ranks(3);
  std::vector<std::atomic<std::size_t>> begun(ranks.size());
  std::atomic<std::size_t> farthest = 0;
  std::vector<std::thread> threads;
  for (const auto& rank : ranks) {
    threads.emplace_back([&, ranks = rank.get()] {
      DrivePeers peers(*ranks, drive, records, no_end);
      for (std::size_t record = 0; record < 2 * records; ++record) {
        if (ranks->rank() == 0) {  // the slowest
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          for (const auto& other : begun)
            farthest = std::max<std::size_t>(farthest, other - std::min<std::size_t>(other, record));
        }
        peers.begin_record(0);
        ++begun[ranks->rank()];
      }
    });
  }
  for (std::thread& thread : threads)
    thread.join();
  CHECK(farthest <= most_ahead);
  CHECK(begun[0] == 2 * records);
}

TEST_CASE("ranks on different drives take no turns, and those that have left are not waited for") {
  auto ranks = thread_ranks(2);
  std::thread other([&] {
    const DrivePeers elsewhere(*ranks[1], drive + 1, records, no_end);
    { const DrivePeers leaves(*ranks[1], drive, records, no_end); }
    ranks[1]->barrier();
    ranks[1]->barrier();
  });
  DrivePeers alone(*ranks[0], drive, records, no_end);
  DrivePeers left(*ranks[0], drive, records, no_end);
  ranks[0]->barrier();
  move_records(alone, records);
  move_records(left, records);
  ranks[0]->barrier();
  other.join();
}

TEST_CASE("a rank that fails while it waits for its round waits no longer") {
  auto ranks = thread_ranks(2);
  std::unique_ptr<DrivePeers> idle;
  std::thread other([&] { idle = std::make_unique<DrivePeers>(*ranks[1], drive, records, no_end); });
  DrivePeers mine(*ranks[0], drive, records, no_end);
  other.join();
  std::thread waits([&] { move_records(mine, records); });
  mine.leave();
  waits.join();
}

TEST_CASE("a rank that is killed or stands still does not hold up those that share its drive") {
  const int signal = GENERATE(SIGKILL, SIGSTOP);
  CAPTURE(signal);
  const ProcessGroupRig rig(2, HostTransport::shared_memory, patient);
  const Signal start, done;
  Processes processes(2, [&](std::size_t rank) {
    rig.as_rank(rank, [&](Communicator& ranks) {
      const std::chrono::milliseconds patience = signal == SIGKILL ? no_end : std::chrono::milliseconds(50);
      DrivePeers peers(ranks, drive, records, patience);
      ranks.barrier();
      if (rank == 1) start.give();
      if (rank == 0) {
        move_records(peers, 2 * records);
        return done.give();
      }
      while (true)
        std::this_thread::sleep_for(std::chrono::seconds(1));
    });
  });
  start.wait();
  processes.send(1, signal);
  done.wait();
  processes.send(1, SIGKILL);
  CHECK(processes.failure(0).empty());
}
