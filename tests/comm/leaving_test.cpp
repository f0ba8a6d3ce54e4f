// Tests of a rank that leaves while others need it: they fail at once, with its reason. Every timeout is an hour, so a
// wait that does not end makes the test hang.
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <csignal>
#include <fstream>
#include <stdexcept>
#include <thread>

#include "tests/comm/process_groups.h"
#include "tests/comm/rank_values.h"
#include "tests/comm/signal.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

constexpr std::chrono::milliseconds an_hour = std::chrono::hours(1);

struct Case {
  std::size_t size, leaver;
  bool others_come_later;
};
const Case cases[] = {{2, 0, false}, {2, 1, true}, {3, 0, true}, {3, 2, false}};

// Returns the errors of all ranks when one leaves, and lives on until the others have ended.
Failures leave_one(const GroupKind& kind, const Case& each, const RankBody& leave) {
  const Signal ready, left, done;
  return kind.run(each.size, an_hour, [&](Communicator& ranks) {
    if (ranks.rank() == each.leaver) {
      ready.wait(each.others_come_later ? 0 : each.size - 1);
      leave(ranks);
      left.give(each.size - 1);
      done.wait(each.size - 1);
      return;
    }
    ready.give();
    if (each.others_come_later) left.wait();
    try {
      ranks.barrier();
    } catch (const std::exception&) {
      done.give();
      throw;
    }
  });
}

// Returns when the process waits for something.
void wait_until_asleep(pid_t process) {
  for (int times_asleep = 0; times_asleep < 10;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::string words;
    std::getline(std::ifstream(fmt::format("/proc/{}/stat", process)), words);
    times_asleep = words[words.rfind(')') + 2] == 'S' ? times_asleep + 1 : 0;
  }
}

}  // namespace

TEST_CASE("ranks that need a rank that has left fail at once with its reason, also in later calls") {
  for (const GroupKind& kind : group_kinds()) {
    for (const Case& each : cases) {
      INFO(kind.name << ", rank " << each.leaver << " of " << each.size << ", later: " << each.others_come_later);
      const auto leave = [](Communicator& ranks) { ranks.leave({.words = "it has no more batches"}); };
      const Failures failures = leave_one(kind, each, leave);
      for (std::size_t rank = 0; rank < each.size; ++rank) {
        if (rank == each.leaver) {
          CHECK(failures[rank].empty());
        } else {
          CHECK_THAT(failures[rank],
                     Contains("B3301 rank " + std::to_string(each.leaver)) && Contains("left: it has no more batches"));
        }
      }
    }
  }
}

TEST_CASE("a rank that leaves because it has failed ends the others with the first reason that it gives") {
  for (const GroupKind& kind : group_kinds()) {
    INFO(kind.name);
    const Failures failures = leave_one(kind, {3, 1, true}, [](Communicator& ranks) {
      ranks.leave({.words = "ValueError: this batch is bad", .has_failed = true});
      ranks.leave({.words = "never said"});
    });
    for (const std::size_t rank : {0u, 2u}) {
      CHECK_THAT(failures[rank], Contains("B3301 rank 1") && Contains("left: ValueError: this batch is bad"));
    }
  }
}

TEST_CASE("an error states what its rank was doing") {
  for (const GroupKind& kind : group_kinds()) {
    if (kind.name == "threads") continue;  // threads have one error for all
    INFO(kind.name);
    const Failures failures = kind.run(2, an_hour, [](Communicator& ranks) {
      ranks.set_activity("is in step 4");
      if (ranks.rank() == 0) ranks.barrier();
    });
    CHECK_THAT(failures[0], Contains("left: it closed its group, while rank 0 is in step 4"));
  }
}

TEST_CASE("a rank leaves when its communicator is destroyed or an exception ends it") {
  for (const GroupKind& kind : group_kinds()) {
    INFO(kind.name);
    const auto needs = [](Communicator& ranks) {
      if (ranks.rank() != 0) ranks.barrier();
    };
    const Failures failures = kind.run(3, an_hour, needs);
    CHECK(failures[0].empty());
    for (const std::size_t rank : {1u, 2u}) {
      CHECK_THAT(failures[rank], Contains("B3301 rank 0") && Contains("left: it closed its group"));
    }
    const auto throws = [](Communicator& ranks) {
      if (ranks.rank() == 0) throw std::runtime_error("no such data set");
      ranks.barrier();
    };
    CHECK_THAT(kind.run(2, an_hour, throws)[1],  // a group of threads may be aborted with the exception's words
               Contains("B3301") && (Contains("rank 0") || Contains("no such data set")));
  }
}

TEST_CASE("ranks that leave at different times after the last call disturb no other rank") {
  for (int time = 0; time < 10; ++time) {
    for (const GroupKind& kind : group_kinds()) {
      INFO(kind.name);
      CHECK(kind.run(3, an_hour, [&](Communicator& ranks) {
        const auto other = ranks.split(0);
        for (int round = 0; round < 20; ++round) {
          std::int64_t sum[] = {1};
          other->all_reduce(sum);
          expect(sum[0] == 3, "a wrong sum");
          ranks.barrier();
        }
        ranks.leave({.words = "it is done"});
      }) == Failures(3));
    }
  }
}

// The other rank is stopped: its system has room for a part of the bytes, and the rest waits in the system of the one that leaves.
TEST_CASE("all that a rank has sent arrives, also after it has left") {
  for (const ProcessKind& kind : process_kinds()) {
    if (kind.transport != HostTransport::gloo) continue;  // in shared memory the other rank has taken it before
    const Signal begun, may_send;
    const ProcessGroupRig rig(2, kind.transport, an_hour);
    Processes processes(2, [&](std::size_t rank) {
      rig.as_rank(rank, [&](Communicator& ranks) {
        Values values = Values::of_rank(rank, DType::fp32, 200'000);
        if (rank == 0) begun.give();
        if (rank == 1) may_send.wait();
        ranks.broadcast(values.view(), 1);
        expect(values == Values::of_rank(1, DType::fp32, 200'000), "other values than were sent");
      });
    });
    begun.wait();
    wait_until_asleep(processes.process(0));
    processes.send(0, SIGSTOP);
    may_send.give();
    CHECK(processes.failure(1).empty());
    processes.send(0, SIGCONT);
    CHECK(processes.failure(0).empty());
  }
}

TEST_CASE("after rank 0 has left, the other ranks still learn of a death among them") {
  for (const ProcessKind& kind : process_kinds()) {
    INFO(kind.name);
    const Signal left, joined, done;
    const ProcessGroupRig rig(3, kind.transport, an_hour);
    Processes processes(3, [&](std::size_t rank) {
      rig.as_rank(rank, [&](Communicator& ranks) {
        const auto part = ranks.split(rank == 0 ? 0 : 1);
        if (rank == 0) return ranks.leave({.words = "it is done"});
        if (rank == 2) joined.give();  // the other rank of the part has its memory too
        if (rank == 1) part->barrier();
        done.wait();
      });
      left.give();  // rank 0: without waiting for the others
      done.wait();
    });
    left.wait();
    joined.wait();
    processes.send(2, SIGKILL);
    CHECK_THAT(processes.failure(1), Contains("B3301 rank 2 (") && Contains("died"));
    done.give();
    CHECK(processes.failure(0).empty());
  }
}

TEST_CASE("ranks that do not need rank 0 work on for longer than the timeout after it has left") {
  constexpr auto timeout = std::chrono::milliseconds(4000);
  for (const ProcessKind& kind : process_kinds()) {
    INFO(kind.name);
    const Signal done;
    const ProcessGroupRig rig(3, kind.transport, timeout);
    Processes processes(3, [&](std::size_t rank) {
      rig.as_rank(rank, [&](Communicator& ranks) {
        const auto part = ranks.split(rank == 0 ? 0 : 1);
        if (rank == 0) return ranks.leave({.words = "it is done"});
        for (int i = 0; i < 4; ++i) {  // each wait is much shorter than the timeout, and all together are longer
          std::this_thread::sleep_for(rank == 2 ? timeout / 3 : std::chrono::milliseconds(0));
          part->barrier();
        }
      });
      if (rank == 0) done.wait(2);
      if (rank != 0) done.give();
    });
    CHECK(processes.failures() == Failures(3));
  }
}

TEST_CASE("the end of a rank is noticed although its forked child lives") {
  for (const ProcessKind& kind : process_kinds()) {
    INFO(kind.name);
    for (const std::size_t victim : {0u, 1u}) {
      const Signal done;
      const ProcessGroupRig rig(2, kind.transport, an_hour);
      Processes processes(2, [&](std::size_t rank) {
        rig.as_rank(rank, [&](Communicator& ranks) {
          ranks.barrier();
          if (rank != victim) return ranks.barrier();
          if (::fork() == 0) {
            done.wait();
            ::_exit(0);
          }
          ::_exit(0);
        });
      });
      CHECK_THAT(processes.failure(1 - victim), Contains("B3301") && Contains("died: connection lost"));
      done.give();
    }
  }
}

TEST_CASE("a very long reason reaches the other ranks, shortened") {
  const ProcessGroupRig rig(2, HostTransport::shared_memory, an_hour);
  Processes processes(2, [&](std::size_t rank) {
    rig.as_rank(rank, [&](Communicator& ranks) {
      if (rank == 0) return ranks.barrier();
      ranks.abort("a tensor: " + std::string(std::size_t{3} << 20, '0'));
    });
  });
  CHECK_THAT(processes.failure(0), Contains("B3301 rank 1 (") && Contains("a tensor: 000") && Contains("000..."));
}
