// How communicators of NCCL are made, work and end where a rank is alone, or NCCL is configured by its variables.
#include <sys/types.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <csignal>
#include <cstdlib>
#include <stdexcept>

#include "kernels/runtime/buffer.h"
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

TEST_CASE("a rank that is killed before it gathers from the host's memory ends the other, which names it") {
  const Failures failures = failures_on_two_gpus([](RankOnGpu& rank) {
    const auto group = rank.split_host();
    MemoryAccounts accounts;
    const Buffer mine = allocate(accounts, {.kind = MemoryKind::pinned,
                                            .bytes = 1 << 20,
                                            .owner = "mine",
                                            .gpu = rank.gpu,
                                            .allocator = group->shared_memory()});
    const Buffer all =
        allocate(accounts, {.kind = MemoryKind::device, .bytes = 2 * mine.bytes(), .owner = "all", .gpu = rank.gpu});
    for (int round = 0; round < 3; ++round) {
      if (round == 2 && rank.world.rank() == 1) ::kill(::getpid(), SIGKILL);
      group->all_gather(mine.view(DType::u8), all.view(DType::u8));
    }
  });
  CHECK(failures[1] == "signal 9");
  CHECK_THAT(failures[0], Contains("B3301") && Contains("rank 1"));
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
