// Trainings on several emulated GPUs: each rank has one, and NCCL connects them.
#include <catch2/catch.hpp>

#include "tests/comm/process_groups.h"
#include "tests/emulated_cuda/emulated.h"
#include "tests/sanitizer.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

void expect_same(const Outcome& found, const Outcome& expected) {
  expect(found.seen == expected.seen, "the trainer saw other parameters than on the CPU");
  expect(found.norms == expected.norms, "the norms are not those of the CPU");
  expect(found.parameters == expected.parameters, "the last parameters are not those of the CPU");
}

// A rank in a process of its own leaves nothing behind, and touches no GPU but its own.
void train_as_process(Setup setup, Communicator& world, const Outcome& expected) {
  setup.gpu = static_cast<int>(world.rank());
  emulated::allow_context_only_on(*setup.gpu);
  expect_same(train_rank(setup, world), expected);
  expect(emulated::gpus_with_context() == std::vector<int>{*setup.gpu}, "a context is missing");
}

void check_ranks_as_processes(const Setup& setup, const std::vector<Outcome>& expected) {
  const ProcessGroupRig rig(expected.size(), HostTransport::shared_memory, patient);
  Processes processes(expected.size(), [&](std::size_t rank) {
    rig.as_rank(rank, [&](Communicator& world) { train_as_process(setup, world, expected[rank]); });
    expect(emulated::live() == emulated::Live{}, "something of the GPU was left behind");
  });
  CHECK(processes.failures() == Failures(expected.size()));
}

Setup with_directory(Setup setup, const TemporaryDirectory& folder) {
  setup.directory = folder.path();
  return setup;
}

void check_all_placements(std::size_t ranks, const Setup& with) {
  Setup on_cpu = with;
  on_cpu.placement = placement_of_stage(0, ranks);
  const std::vector<Outcome> expected = train(on_cpu);
  Sweep sweep(5);
  for (const Placement& placement : placements(ranks)) {
    if (!sweep.takes_next()) continue;
    CAPTURE(ranks, placement.shards, placement.full_parameters, placement.parameters.fractions(),
            placement.gradients.fractions(), placement.state.fractions());
    const TemporaryDirectory folder;
    Setup setup = with_directory(with, folder);
    setup.placement = placement;
    check_ranks_as_processes(setup, expected);
  }
}

}  // namespace

TEST_CASE("ranks with a GPU each give the bits of ranks on the CPU") {
  check_all_placements(2, {.micro_steps = 2, .max_norm = 0.05});
}

TEST_CASE("three ranks with a GPU each prefetch, update in the backward pass and offload") {
  check_all_placements(3,
                       {.schedule = {.prefetch = 2, .kept_records = 2, .update_in_backward = true}, .offloads = true});
}

TEST_CASE("ranks with a GPU each keep gradients in bf16 as ranks on the CPU do") {
  check_all_placements(2, {.micro_steps = 3, .gradient_format = GradientFormat::bf16, .max_norm = 0.05});
}

TEST_CASE("four ranks with a GPU each shard in pairs, and reduce between the pairs") {
  for (const auto gradient_format : {GradientFormat::fp32, GradientFormat::bf16}) {
    Setup setup{.placement = placement_of_stage(3, 2), .micro_steps = 2, .gradient_format = gradient_format};
    setup.placement.replicas = 2;
    const std::vector<Outcome> expected = train(setup);
    const TemporaryDirectory folder;
    check_ranks_as_processes(with_directory(setup, folder), expected);
  }
}

TEST_CASE("four ranks with a GPU each keep a copy of the parameters in each pair") {
  Setup setup{.placement = placement_of_stage(3, 4), .micro_steps = 2, .schedule = {.prefetch = 2}, .offloads = true};
  setup.placement.parameter_replicas = 2;
  const std::vector<Outcome> expected = train(setup);
  for (const Tier tier : {Tier::device, Tier::host}) {
    setup.placement.state = all_in(tier);
    const TemporaryDirectory folder;
    check_ranks_as_processes(with_directory(setup, folder), expected);
  }
}
