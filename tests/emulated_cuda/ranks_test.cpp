// Trainings on several emulated GPUs: each rank has one, and NCCL connects them.
#include <catch2/catch.hpp>

#include "tests/emulated_cuda/two_gpus.h"
#include "tests/sanitizer.h"
#include "tests/zero/gpu_cases.h"
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
Outcome train_as_process(Setup setup, Communicator& world, const Outcome& expected) {
  setup.gpu = static_cast<int>(world.rank());
  emulated::allow_context_only_on(*setup.gpu);
  Outcome outcome = train_rank(setup, world);
  expect_same(outcome, expected);
  expect(emulated::gpus_with_context() == std::vector<int>{*setup.gpu}, "a context is missing");
  return outcome;
}

void check_as_processes(std::size_t ranks, const RankBody& body) {
  const ProcessGroupRig rig(ranks, HostTransport::shared_memory, patient);
  Processes processes(ranks, [&](std::size_t rank) {
    rig.as_rank(rank, body);
    expect(emulated::live() == emulated::Live{}, "something of the GPU was left behind");
  });
  CHECK(processes.failures() == Failures(ranks));
}

void check_ranks_as_processes(const Setup& setup, const std::vector<Outcome>& expected) {
  check_as_processes(expected.size(),
                     [&](Communicator& world) { train_as_process(setup, world, expected[world.rank()]); });
}

// Each training has the bits of ranks on the CPU.
void check_ranks_as_processes(
    const std::vector<Setup>& setups, const std::function<void(const Outcome&)>& check = [](const Outcome&) {}) {
  std::vector<std::vector<Outcome>> expected;
  std::ranges::transform(setups, std::back_inserter(expected), train);
  check_as_processes(expected[0].size(), [&](Communicator& world) {
    for (std::size_t i = 0; i < setups.size(); ++i)
      check(train_as_process(setups[i], world, expected[i][world.rank()]));
  });
}

Placement in_stage(int stage, Tier state) {
  Placement placement = placement_of_stage(stage, 2);
  placement.state = Spread(state);
  return placement;
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

// Their links are as fast as the host's memory, and faster than those between GPUs.
TEST_CASE("ranks with a GPU each copy the parameters of all from the host's memory, with the bits of the CPU") {
  for (const std::size_t ranks : {2u, 4u}) {
    Setup setup{.placement = placement_of_stage(3, ranks), .micro_steps = 2, .max_norm = 0.05};
    setup.rates = {.upload = 1, .download = 1, .host_memory = 3, .peers = 0.1, .shared = 1};
    std::vector<Setup> setups;
    for (const Tier gradients : {Tier::device, Tier::host}) {
      setup.placement.parameters = setup.placement.state = Tier::host;
      setup.placement.gradients = gradients;
      setups.push_back(setup);
    }
    setups.push_back({.placement = setup.placement, .rates = setup.rates, .poisoned_step = 1, .offloads = true});
    setups.push_back({.placement = setup.placement, .rates = setup.rates, .uses_by_step = off_plan_steps()});
    setups.push_back({.placement = setup.placement, .model_times = 6, .tile_elements = 128, .rates = setup.rates});
    setups.push_back(
        {.placement = setup.placement, .schedule = {.prefetch = 2, .update_in_backward = true}, .rates = setup.rates});
    check_ranks_as_processes(setups, [](const Outcome& outcome) {
      expect(outcome.planned_moves[static_cast<std::size_t>(Lane::gather)] == 0, "GPUs gather from each other");
    });
  }
}

TEST_CASE("a gather from the host's memory ends when all GPUs have copied") {
  constexpr std::size_t bytes = std::size_t{2} << 20;
  check_as_processes(3, [](Communicator& world) {
    RankOnGpu rank(world);
    const int gpu = rank.gpu;
    const auto group = rank.split_host();
    MemoryAccounts accounts;
    const Buffer mine = allocate(
        accounts,
        {.kind = MemoryKind::pinned, .bytes = bytes, .owner = "mine", .gpu = gpu, .allocator = group->shared_memory()});
    expect(mine.pinned(), "memory that ranks share is not pinned");
    const Buffer all =
        allocate(accounts, {.kind = MemoryKind::device, .bytes = world.size() * bytes, .owner = "all", .gpu = gpu});
    std::vector<unsigned char> seen(all.bytes());
    for (unsigned char round = 0; round < 10; ++round) {
      std::memset(mine.data(), static_cast<int>(10 * world.rank() + round), bytes);
      group->all_gather(mine.view(DType::u8), all.view(DType::u8));
      std::memset(mine.data(), 0xff, bytes);
      copy(seen.data(), all.data(), all.bytes(), rank.stream);
      rank.stream.synchronize();
      for (std::size_t i = 0; i < seen.size(); ++i)
        expect(seen[i] == 10 * (i / bytes) + round, "a rank's values were copied after it had changed them");
    }
  });
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
    setup.placement.state = Spread(tier);
    const TemporaryDirectory folder;
    check_ranks_as_processes(with_directory(setup, folder), expected);
  }
}

TEST_CASE("ranks with a GPU each send codes as ranks on the CPU do") {
  const Wire reduced{.reduce = WireFormat::int8}, both{.gather = WireFormat::int8, .reduce = WireFormat::int4};
  check_ranks_as_processes({{.placement = in_stage(2, Tier::device), .micro_steps = 2, .wire = reduced},
                            {.placement = in_stage(3, Tier::device), .wire = both, .max_norm = 0.05},
                            {.placement = in_stage(3, Tier::host), .wire = both, .offloads = true}});
}

TEST_CASE("ranks with a GPU each keep four bits of a moment, and gather what they updated ahead, as on the CPU") {
  const TemporaryDirectory folder;
  Setup on_drive{.placement = in_stage(3, Tier::nvme), .format = StateFormat::four_bit};
  on_drive.directory = folder.path();
  Setup mixed{.placement = in_stage(2, Tier::device), .schedule = {.overlap_gathers = true}, .max_norm = 0.05};
  mixed.placement.state = {0.5, 0.5, 0.0};
  check_ranks_as_processes(
      {{.placement = in_stage(3, Tier::device), .format = StateFormat::four_bit}, on_drive, mixed});
}

TEST_CASE("ranks with a GPU each train with Muon to the same bits at every stage and on every tier") {
  const TemporaryDirectory folder;
  check_as_processes(2, [&](Communicator& world) {
    const int gpu = static_cast<int>(world.rank());
    const Setup reference{.placement = placement_of_stage(0, 2), .muon = true, .steps = 2, .gpu = gpu};
    const Outcome expected = train_rank(reference, world);
    for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
      if (sanitized && tier != Tier::host) continue;  // this takes minutes
      Setup setup = reference;
      setup.placement = in_stage(tier == Tier::host ? 2 : 3, tier);
      setup.tile_elements = 128;
      setup.schedule = {.kept_records = 1, .update_in_backward = tier == Tier::nvme};
      setup.directory = folder.path();
      expect_same(train_rank(setup, world), expected);
    }
  });
}

TEST_CASE("ranks with a GPU each mirror their run, which survives the loss of a drive") {
  const TemporaryDirectory folder;
  Setup setup{.placement = in_stage(3, Tier::nvme), .steps = 5};
  const std::vector<Outcome> expected = train(setup);
  setup.keeps_run = setup.mirrors = true;
  setup.directory = folder.path();
  check_as_processes(2, [&](Communicator& world) {
    Setup on_gpu = setup;
    on_gpu.gpu = static_cast<int>(world.rank());
    on_gpu.steps = 3;
    static_cast<void>(train_rank(on_gpu, world));
    world.barrier();
    if (world.rank() == 1) std::filesystem::remove_all(setup.directory / "1");
    on_gpu.steps = setup.steps;
    const Outcome resumed = train_rank(on_gpu, world);
    expect(resumed.began_at == 3, "the run does not resume after the loss of a drive");
    expect(resumed.parameters == expected[world.rank()].parameters, "the parameters are not those of the CPU");
  });
}
