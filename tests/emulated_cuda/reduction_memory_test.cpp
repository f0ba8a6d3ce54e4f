// The memory of reductions between GPUs: the plan counts it, and a training reserves it before the first step.
#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "tests/emulated_cuda/two_gpus.h"
#include "tests/zero/training_rig.h"
#include "zero/comm/transport.h"
#include "zero/plan/collective_memory.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

constexpr std::size_t MiB = std::size_t{1} << 20;

std::size_t bytes_of(const Ledger& ledger, std::string_view owner) {
  const auto entry = std::ranges::find(ledger, owner, &LedgerEntry::owner);
  return entry == ledger.end() ? 0 : entry->bytes;
}

std::size_t reserved_on_device(const Training& training) {
  std::size_t bytes = 0;
  for (const MemoryAccounts::Entry& entry : training.memory().entries())
    bytes += entry.kind == MemoryKind::device ? entry.usage.now : 0;
  return bytes;
}

void check_memory_of_rank(const TrainingOptions& asked, std::size_t ranks_per_host, Communicator& world) {
  const Model model = odd_model(16);
  const Stream stream(static_cast<int>(world.rank()));
  TrainingOptions options = asked;
  options.gpu = stream.gpu();
  options.stream = stream.handle();
  const std::vector<optim::Rule> rules{optim::AdamW{}, optim::AdamW{}};
  const Ledger planned = Plan(model, {world.rank(), world.size(), ranks_per_host}, rules, options).ledger();
  expect(bytes_of(planned, "received") > 0, "the plan has no memory for values of other ranks");
  expect((bytes_of(planned, "host_sums") > 0) == (ranks_per_host > 1), "the plan's memory for sums of hosts");
  Training training(model, world, rules, options);
  expect(training.ledger() == planned, "the ledger is not that of the plan");
  const std::size_t late = bytes_of(planned, "parameters") + bytes_of(planned, "state");
  expect(TrainingState(training).unreserved_bytes() == late,
         "other memory than that of parameters and state is reserved later");
  expect(reserved_on_device(training) + late == bytes_in(planned, Tier::device), "not all of the ledger is reserved");
  training.initialize(initial_parameters());
  expect(reserved_on_device(training) == bytes_in(planned, Tier::device), "not all is reserved at the beginning");
  SyntheticTrainer trainer(model, world.rank(), &stream);
  const std::size_t before = emulated::live().device_bytes;
  for (std::size_t step = 0; step < 3; ++step) {
    trainer.run(training, step);
    training.step();
    training.finish();
    const std::size_t now = emulated::live().device_bytes;
    expect(now == before, fmt::format("step {} changed the bytes on the device from {} to {}", step, before, now));
    if (step > 0) continue;
    TrainingState(training).offload();
    TrainingState(training).reload();
  }
}

void check_memory(GroupShape shape, const std::vector<TrainingOptions>& trainings) {
  const ProcessGroupRig rig(shape, HostTransport::shared_memory, patient);
  Processes processes(shape.size, [&](std::size_t number) {
    rig.as_rank(number, [&](Communicator& world) {
      for (const TrainingOptions& options : trainings)
        check_memory_of_rank(options, shape.ranks_per_host, world);
    });
  });
  CHECK(processes.failures() == Failures(shape.size));
}

constexpr Wire codes{.gather = WireFormat::int8, .reduce = WireFormat::int4};
constexpr Wire two_level_codes{.gather = WireFormat::int8, .reduce = WireFormat::int8, .across = WireFormat::int4};
constexpr Wire reduced{.reduce = WireFormat::int4};

}  // namespace

TEST_CASE("two GPUs reserve what the plan counts for reductions, and nothing more in a step") {
  check_memory(2, {{.stage = 0}, {.stage = 2}, {.stage = 3}, {.stage = 0, .wire = reduced}, {.wire = codes}});
}

TEST_CASE("four GPUs in two groups reserve what the plan counts for reductions, and nothing more in a step") {
  check_memory(4, {{.replicas = 2}, {.parameter_replicas = 2}, {.replicas = 2, .wire = codes}});
}

TEST_CASE("four GPUs of two hosts reserve what the plan counts for reductions, and nothing more in a step") {
  check_memory({4, 2}, {{.stage = 0}, {.stage = 3}, {.stage = 0, .wire = reduced}, {.wire = two_level_codes}});
}

TEST_CASE("a training on a GPU that has too little memory for reductions fails before its first step") {
  const Model model = plain_model(1, 8 * MiB);
  const std::vector<optim::Rule> rules{optim::AdamW{}};
  TrainingOptions options{.stage = 2, .gpu = 0};
  const Ledger planned = Plan(model, {0, 2}, rules, options).ledger();
  REQUIRE(bytes_of(planned, "received") == 16 * MiB);
  const std::size_t most =  // before the training begins
      bytes_in(planned, Tier::device) - bytes_of(planned, "parameters") - bytes_of(planned, "state");
  const ProcessGroupRig rig(2, HostTransport::shared_memory, patient);
  Processes processes(2, [&](std::size_t rank) {
    emulated::set_machine({.gpus = 2, .memory_bytes = emulated::context_bytes + most - 8 * MiB});
    rig.as_rank(rank, [&](Communicator& world) {
      RankOnGpu on_gpu(world);
      options.gpu = on_gpu.gpu;
      options.stream = on_gpu.stream.handle();
      const Training training(model, world, rules, options);
    });
  });
  for (const std::string& failure : processes.failures()) {
    CHECK_THAT(failure, Contains("received") && Contains("16 MiB"));
  }
}

namespace {

std::vector<std::string> hosts_of(std::size_t first, std::size_t step, std::size_t size, std::size_t per_host) {
  std::vector<std::string> hosts;
  for (std::size_t i = 0; i < size; ++i)
    hosts.push_back(std::to_string((first + i * step) / per_host));
  return hosts;
}

// Checks the groups of all ranks of a placement.
void check_groups(const Placement& placement, std::size_t per_host) {
  const std::size_t of_group = placement.ranks_per_group();
  for (std::size_t rank = 0; rank < placement.ranks(); ++rank) {
    const auto planned = [&](Ranks ranks) { return reducing_ranks(placement, rank, per_host, ranks).per_host; };
    const auto neighbours = hosts_of(rank / of_group * of_group, 1, of_group, per_host);
    const auto replicas = hosts_of(rank % of_group, of_group, placement.groups(), per_host);
    CAPTURE(placement.ranks(), of_group, per_host, rank);
    CHECK(planned(Ranks::shard_group) == kernels::ranks_per_host(neighbours));
    CHECK(planned(Ranks::replica_group) == kernels::ranks_per_host(replicas));
  }
}

}  // namespace

TEST_CASE("plans find the same ranks of each host in a group as the group itself") {
  for (std::size_t ranks = 1; ranks <= 24; ++ranks) {
    for (std::size_t of_group = 1; of_group <= ranks; ++of_group) {
      if (ranks % of_group != 0) continue;
      Placement placement = placement_of_stage(3, of_group);
      placement.replicas = ranks / of_group;
      for (std::size_t per_host = 1; per_host <= ranks; ++per_host)
        check_groups(placement, per_host);
    }
  }
}
