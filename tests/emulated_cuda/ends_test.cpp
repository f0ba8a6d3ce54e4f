// How communicators of NCCL are made, work and end where a rank is alone, or NCCL is configured by its variables.
#include <catch2/catch.hpp>
#include <cstdlib>
#include <stdexcept>

#include "kernels/runtime/buffer.h"
#include "tests/comm/signal.h"
#include "tests/emulated_cuda/two_gpus.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

// Each rank has a number, and all add them.
void expect_sum(RankOnGpu& rank, Communicator& group, float expected) {
  MemoryAccounts accounts;
  const Buffer memory =
      allocate(accounts, {.kind = MemoryKind::device, .bytes = 256, .owner = "test", .gpu = rank.gpu});
  const View mine = memory.view(DType::fp32).part(0, 1), sum = memory.view(DType::fp32).part(1, 1);
  const float value = static_cast<float>(rank.world.rank() + 1);
  float found = 0;
  copy(mine.data(), &value, sizeof value, rank.stream);
  group.all_reduce(mine, sum);
  copy(&found, sum.data(), sizeof found, rank.stream);
  rank.stream.synchronize();
  rank.world.barrier();  // throws the job's error
  expect(found == expected, "another sum");
}

constexpr auto a_while = std::chrono::seconds(20);  // longer than the groups of a rank wait for others at their ends

}  // namespace

TEST_CASE("a rank that ends its groups of NCCL before the others ends them in a few seconds") {
  CHECK(failures_on_two_gpus(
            [](RankOnGpu& rank) {
              auto group = rank.split();
              expect_sum(rank, *group, 3);
              if (rank.world.rank() == 1) group.reset();
              rank.world.barrier();  // the other group lives until rank 1 arrives
            },
            a_while) == Failures(2));
}

TEST_CASE("a rank that ends by an exception does not wait for the others' groups of NCCL") {
  const Failures failures = failures_on_two_gpus(
      [](RankOnGpu& rank) {
        const auto group = rank.split();
        if (rank.world.rank() == 1) throw std::runtime_error("the script has ended");
        rank.world.barrier();
      },
      a_while);
  CHECK(failures[1] == "the script has ended");
  CHECK_THAT(failures[0], Contains("rank 1") && Contains("ended by an exception"));
}

// Rank 0's timeout ends first, in a wait for rank 1. Rank 1 waits for rank 2 meanwhile, and rank 2 for rank 3, in other groups.
TEST_CASE("a timeout names the rank at the end of a chain of waits in different groups of NCCL") {
  constexpr auto time_of_rank_0 = std::chrono::milliseconds(4000);  // to connect too
  const ProcessGroupRig rig(4, HostTransport::shared_memory, patient);
  const Signal others_ended;
  Processes processes(4, [&](std::size_t number) {
    rig.as_rank(number, number == 0 ? time_of_rank_0 : patient, [&](Communicator& world) {
      RankOnGpu rank(world);
      const auto pair = rank.split(number / 2);          // {0, 1} and {2, 3}
      const auto middle = rank.split((number + 1) / 2);  // {0}, {1, 2} and {3}
      if (number == 3) return others_ended.wait();
      expect_sum(rank, number == 1 ? *middle : *pair, 0);
    });
  });
  for (const std::size_t rank : {0u, 1u, 2u}) {
    CHECK_THAT(processes.failure(rank), Contains("B330") && Contains("rank 3 (") && Contains("did not arrive"));
  }
  others_ended.give();
  CHECK(processes.failure(3).empty());
}

TEST_CASE("ranks work with an NCCL whose calls do not block") {
  ::setenv("NCCL_COMM_BLOCKING", "0", 1);
  CHECK(failures_on_two_gpus([](RankOnGpu& rank) {
          const auto group = rank.split();
          expect_sum(rank, *group, 3);
          expect_sum(rank, *rank.split(), 3);
        }) == Failures(2));
  ::unsetenv("NCCL_COMM_BLOCKING");
}

TEST_CASE("a group of one GPU makes no communicator of NCCL") {
  CHECK(failures_on_two_gpus([](RankOnGpu& rank) {
          emulated::reset_counts();
          const auto alone = rank.split(rank.world.rank());
          expect_sum(rank, *alone, static_cast<float>(rank.world.rank() + 1));
          for (const auto& [call, times] : emulated::counts())
            expect(!call.starts_with("nccl"), "a call of NCCL: " + call);
        }) == Failures(2));
}
