// Tests of trainings whose ranks send codes: stages, tiers and programs do not change their bits, and parameters stay exact where
// they are kept.
#include <catch2/catch.hpp>

#include "kernels/quantize.h"
#include "tests/temporary_directory.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

constexpr auto int8 = WireFormat::int8;
constexpr auto int4 = WireFormat::int4;

// Compares with the same training at all stages and tiers that have the same bits: stage 0 rounds sums once more.
void check_all_placements(const Setup& reference) {
  const std::size_t ranks = reference.placement.shards;
  const std::vector<Outcome> expected = train(reference);
  check_as_planned(expected);
  for (const Placement& placement : placements(ranks)) {
    if (placement.shards == 1) continue;
    if (placement.full_parameters && reference.wire.gather != WireFormat::exact) continue;
    CAPTURE(ranks, placement.full_parameters, placement.parameters.fractions(), placement.gradients.fractions(),
            placement.state.fractions());
    Setup setup = reference;
    setup.placement = placement;
    setup.tile_elements = 384;
    setup.schedule.prefetch = 2;
    const std::vector<Outcome> outcomes = train(setup);
    check_same(expected, outcomes);
    check_as_planned(outcomes);
  }
}

// Encodes to nearest, and decodes.
std::vector<std::byte> decoded(const ConstView& values) {
  constexpr auto eight = kernels::CodeBits::eight;
  const auto backend = kernels::cpu_backend({.threads = 1});
  std::vector<float> memory(kernels::quantized_bytes(values.count(), eight) / sizeof(float));
  const View blocks(reinterpret_cast<std::byte*>(memory.data()), memory.size() * sizeof(float), DType::u8);
  std::vector<std::byte> result(values.bytes());
  backend->quantize(values, {eight, blocks}, {});
  backend->dequantize({eight, blocks}, {result.data(), values.count(), values.dtype()});
  return result;
}

std::string message_of(std::size_t ranks, const TrainingOptions& options) {
  const auto failures = failures_of_ranks(
      ranks, [&](Communicator& world) { const Training training(plain_model(2), world, {optim::AdamW{}}, options); });
  return failures[0];
}

// The values of a unit's first tensor when the training began.
std::vector<std::byte> initial_values(const ConstView& like) {
  std::vector<std::byte> bytes(like.bytes());
  initial_parameters()(0, 0, {0, like.count()}, {bytes.data(), like.count(), like.dtype()});
  return bytes;
}

// Adds the same gradient in each backward pass, and returns the sums of two steps. One value of a group is 127, so that a step
// of int8 is 1; the others, 0.5, are rounded up or down.
std::vector<std::vector<float>> sums_of_equal_gradients(std::size_t ranks, std::size_t micro_steps) {
  constexpr std::size_t elements = 16 * group_size;
  std::vector<std::vector<float>> sums(2, std::vector<float>(elements));
  const auto failures = failures_of_ranks(ranks, [&](Communicator& world) {
    Training training(plain_model(1, elements), world, {optim::External{}},
                      {.stage = 2, .format = StateFormat::fp32, .micro_steps = micro_steps, .wire = {.reduce = int8}});
    training.initialize(initial_parameters());
    const std::vector<optim::Rule> rules{optim::External{}};
    for (std::vector<float>& sum : sums) {
      for (std::size_t micro_step = 0; micro_step < micro_steps; ++micro_step) {
        { const Lease forward = training.forward(0); }
        const Lease lease = training.backward(0);
        for (std::size_t i = 0; i < elements; ++i)
          set_value(lease.gradient(0), i, i % group_size == 0 ? 127.0f : 0.5f);
      }
      const auto look = [&](const TilesToUpdate& turn) {
        for (const SummedTile& tile : turn.tiles)
          std::ranges::copy(ConstView(tile.gradients).as<float>(), sum.begin() + static_cast<long>(tile.range.first));
      };
      training.step({.groups = rules, .update = look});
    }
  });
  CHECK(failures == std::vector<std::string>(ranks));
  return sums;
}

// Takes steps that change nothing, and throws unless the first unit's parameters are decoded where they are used, and exact
// where they are kept or requested.
void keeps_exact_values(Communicator& world, Tier tier) {
  const Model model = odd_model();
  const optim::AdamW idle{.lr = 0.0, .weight_decay = 0.0};
  Training training(model, world, {idle, idle},
                    {.parameters = Spread(tier), .state = Spread(tier), .wire = {.gather = int8, .reduce = int8}});
  training.initialize(initial_parameters());
  SyntheticTrainer trainer(model, world.rank());
  for (std::size_t step = 0; step < 3; ++step) {
    trainer.run(training, step);
    training.step();
  }
  training.finish();
  std::vector<std::byte> exact;
  {
    const Lease lease = training.forward(0);
    const ConstView used = lease[0];
    exact = initial_values(used);
    if (!std::ranges::equal(used.as_bytes(), decoded({exact.data(), used.count(), used.dtype()})))
      throw std::logic_error("the used parameters are not the decoded ones");
  }
  {
    const Lease lease = TrainingState(training).exact_parameters(0);
    if (!std::ranges::equal(lease[0].as_bytes(), exact)) throw std::logic_error("the exact parameters are not exact");
  }
  TrainingState(training).visit([&](const LocalTile& tile) {
    if (tile.unit != 0) return;
    const std::size_t width = byte_size(model.units[0].dtype);
    const std::size_t first = std::min(tile.range.first * width, exact.size());
    const std::size_t bytes = std::min(tile.memory.count * width, exact.size() - first);
    if (!std::equal(tile.memory.parameter, tile.memory.parameter + bytes, exact.data() + first))
      throw std::logic_error("a kept parameter has changed");
  });
}

}  // namespace

TEST_CASE("encoded reductions give the same bits at stages 1 to 3, on all tiers") {
  for (const std::size_t ranks : {2u, 3u}) {
    check_all_placements({.placement = placement_of_stage(2, ranks), .micro_steps = 2, .wire = {.reduce = int8}});
  }
  check_all_placements({.placement = placement_of_stage(2, 2), .wire = {.reduce = int4}});
  check_all_placements({.placement = placement_of_stage(2, 2),
                        .gradient_format = GradientFormat::bf16,
                        .wire = {.reduce = int8},
                        .max_norm = 0.05});
}

TEST_CASE("encoded gathers give the same bits on all tiers of stage 3") {
  check_all_placements({.placement = placement_of_stage(3, 2), .wire = {.gather = int8}});
  check_all_placements(
      {.placement = placement_of_stage(3, 3), .micro_steps = 2, .wire = {.gather = int8, .reduce = int8}});
}

TEST_CASE("each step, backward pass and rank rounds with random bits of its own, and right on average") {
  for (const std::size_t micro_steps : {1u, 3u}) {
    const auto sums = sums_of_equal_gradients(2, micro_steps);
    CHECK(sums[0] != sums[1]);
    const std::size_t roundings = 2 * micro_steps;
    std::vector<std::size_t> times(roundings + 1);  // how many values were rounded up how often
    double total = 0;
    for (const float sum : sums[0]) {
      if (sum >= 127.0f) continue;
      total += sum;
      ++times.at(static_cast<std::size_t>(sum));
    }
    CHECK(std::ranges::all_of(times, [](std::size_t count) { return count > 0; }));
    CHECK(total / (16 * (group_size - 1)) == Approx(0.5 * static_cast<double>(roundings)).epsilon(0.05));
  }
}

TEST_CASE("encoding changes the bits of a training, and only a little") {
  const auto trained = [](const Wire& wire) { return train({.placement = placement_of_stage(3, 2), .wire = wire})[0]; };
  const Outcome exact = trained({});
  for (const Wire& wire : {Wire{.gather = int8}, Wire{.reduce = int8}, Wire{.reduce = int4}}) {
    const Outcome encoded = trained(wire);
    CHECK((encoded.parameters != exact.parameters));
    CHECK(encoded.norms[0] == Approx(exact.norms[0]).epsilon(0.02));
  }
}

TEST_CASE("sums of hosts are encoded once more, with the same bits at stages 2 and 3") {
  Setup hosts{.placement = placement_of_stage(3, 4), .wire = {.reduce = int8, .across = int4}, .ranks_per_host = 2};
  const std::vector<Outcome> expected = train(hosts);
  hosts.placement = placement_of_stage(2, 4);
  check_same(expected, train(hosts));
  hosts.wire.across = int8;
  CHECK(train(hosts)[0].norms != expected[0].norms);
}

TEST_CASE("sums of shard groups are encoded on their way to the replicas, which stay equal") {
  Setup mesh{.placement = placement_of_stage(3, 2), .micro_steps = 2, .wire = {.reduce = int8, .across = int4}};
  mesh.placement.replicas = 2;
  const std::vector<Outcome> expected = train(mesh);
  check_as_planned(expected);
  CHECK((expected[0].parameters == expected[2].parameters));
  for (const Tier tier : {Tier::host, Tier::nvme}) {
    mesh.placement.state = Spread(tier);
    mesh.placement.gradients = Tier::host;
    check_same(expected, train(mesh));
  }
}

TEST_CASE("sums of the groups that share parameters are encoded on their way to the other groups") {
  Setup copies{.placement = placement_of_stage(3, 4),
               .micro_steps = 2,
               .wire = {.gather = int8, .reduce = int8, .across = int4}};
  copies.placement.parameter_replicas = 2;
  const std::vector<Outcome> expected = train(copies);
  check_as_planned(expected);
  CHECK((expected[0].parameters == expected[2].parameters));
  copies.placement.state = Tier::nvme;
  copies.placement.gradients = Tier::host;
  check_same(expected, train(copies));
}

TEST_CASE("sums at stage 0 are encoded on their way to all ranks, which stay equal") {
  for (const GradientFormat format : {GradientFormat::fp32, GradientFormat::bf16}) {
    const std::vector<Outcome> outcomes = train({.placement = placement_of_stage(0, 3),
                                                 .micro_steps = 2,
                                                 .gradient_format = format,
                                                 .wire = {.reduce = int8, .across = int4}});
    check_as_planned(outcomes);
    CHECK((outcomes[0].parameters == outcomes[1].parameters));
    CHECK((outcomes[0].parameters == outcomes[2].parameters));
  }
}

TEST_CASE("an encoded training has the same bits off plan") {
  const auto f = Phase::forward, b = Phase::backward;
  const Trace other{{1, f}, {0, f}, {4, f}, {4, b}, {1, b}, {1, b}, {0, b}};
  Setup setup{.placement = placement_of_stage(3, 2),
              .wire = {.gather = int8, .reduce = int8},
              .steps = 2,
              .uses_by_step = {{other}}};
  const std::vector<Outcome> off_plan = train(setup);
  setup.trace = other;
  const std::vector<Outcome> planned = train(setup);
  CHECK(off_plan[0].on_demand[0] == 1);
  CHECK(planned[0].on_demand[0] == 0);
  check_same(planned, off_plan);
}

TEST_CASE("an encoded training has the same bits if it is updated in the backward pass, or resumed") {
  const Wire wire{.gather = int8, .reduce = int8};
  const std::vector<Outcome> expected = train({.placement = placement_of_stage(3, 2), .wire = wire});
  check_same(expected,
             train({.placement = placement_of_stage(3, 2), .schedule = {.update_in_backward = true}, .wire = wire}));
  const TemporaryDirectory directory;
  Setup run{.placement = placement_of_stage(3, 2), .wire = wire, .steps = 2, .directory = directory.path()};
  run.placement.state = Tier::nvme;
  train(run);
  run.steps = 4;
  const std::vector<Outcome> resumed = train(run);
  CHECK(resumed[0].began_at == 2);
  CHECK((resumed[0].parameters == expected[0].parameters));
}

TEST_CASE("a gradient that is not finite is found through codes, and its parameter is named") {
  for (const int stage : {0, 2, 3}) {
    const Setup setup{.placement = placement_of_stage(stage, 2), .wire = {.reduce = int8}, .poisoned_step = 1};
    for (const Outcome& outcome : train(setup)) {
      CHECK(outcome.steps == 3);
      CHECK(outcome.reasons[1] == "the gradients are not finite, first in w (unit h.0)");
      CHECK(outcome.reasons[2].empty());
    }
  }
}

TEST_CASE("exact uses anywhere in a step change no bit, and become a part of a program that has them in each step") {
  Setup setup{.placement = placement_of_stage(3, 2), .wire = {.gather = int8, .reduce = int8}, .steps = 4};
  const std::vector<Outcome> expected = train(setup);
  const Trace plain = plain_order(odd_model());
  const Trace exact{{.unit = 0, .exact = true}, {.unit = 5, .exact = true}};
  for (const Tier tier : {Tier::device, Tier::nvme}) {
    setup.placement.parameters = setup.placement.state = Spread(tier);
    for (const std::size_t place : {std::size_t{0}, std::size_t{1}, plain.size() / 2, plain.size()}) {
      CAPTURE(static_cast<int>(tier), place);
      Trace uses = plain;
      uses.insert(uses.begin() + static_cast<std::ptrdiff_t>(place), exact.begin(), exact.end());
      setup.uses_by_step = {{uses}};
      const std::vector<Outcome> outcomes = train(setup);
      check_same(expected, outcomes);
      CHECK(outcomes[0].on_demand == std::vector<std::size_t>{1, 1, 0, 0});
    }
  }
}

TEST_CASE("exact uses between the backward passes of a step change no bit") {
  Setup setup{
      .placement = placement_of_stage(3, 2), .micro_steps = 2, .wire = {.gather = int8, .reduce = int8}, .steps = 3};
  const std::vector<Outcome> expected = train(setup);
  const Trace plain = plain_order(odd_model());
  Trace and_exact = plain;
  and_exact.push_back({.unit = 1, .exact = true});
  setup.uses_by_step = {{and_exact, plain}, {plain, and_exact}};
  check_same(expected, train(setup));
}

TEST_CASE("where nothing is encoded, exact parameters are those of the program") {
  Trace uses = plain_order(odd_model());
  uses[0].exact = true;
  for (const Wire& wire : {Wire{.gather = int8}, Wire{}}) {
    const std::size_t ranks = wire.gather == int8 ? 1 : 2;
    const Setup setup{.placement = placement_of_stage(3, ranks), .wire = wire, .uses_by_step = {{uses}}};
    CHECK(train(setup)[0].on_demand == std::vector<std::size_t>(setup.steps));
  }
}

TEST_CASE("an encoded training has the same bits if it is offloaded and reloaded") {
  Setup setup{.placement = placement_of_stage(3, 2), .wire = {.gather = int8, .reduce = int8}};
  const std::vector<Outcome> expected = train(setup);
  setup.offloads = true;
  check_same(expected, train(setup));
}

TEST_CASE("a run resumes with another wire format from exact values") {
  const TemporaryDirectory directory;
  Setup run{.placement = placement_of_stage(3, 2),
            .wire = {.gather = int8, .reduce = int8},
            .steps = 2,
            .keeps_run = true,
            .directory = directory.path()};
  run.placement.state = Tier::nvme;
  train(run);
  run.wire = {.reduce = int8};  // gathers have no codes: parameters that are used are those that are kept
  const std::vector<Outcome> exact = train(run);
  CHECK(exact[0].began_at == 2);
  run.wire = {.gather = int8};
  run.steps = 3;
  const std::vector<Outcome> resumed = train(run);
  CHECK(resumed[0].began_at == 2);
  const std::size_t bytes = odd_model().units[0].tensors[0].elements() * byte_size(DType::bf16);
  const ConstView kept(exact[0].parameters.data(), bytes / byte_size(DType::bf16), DType::bf16);
  CHECK(std::ranges::equal(decoded(kept), std::span(resumed[0].seen[0]).first(bytes)));
}

TEST_CASE("ranks use decoded parameters, and keep exact ones") {
  for (const Tier tier : {Tier::device, Tier::host}) {
    CHECK(failures_of_ranks(2, [&](Communicator& world) { keeps_exact_values(world, tier); }) ==
          std::vector<std::string>(2));
  }
}

TEST_CASE("metrics count the bytes that a rank sends: with int8, at most 0.52 of those of bf16 values") {
  Setup setup{.placement = placement_of_stage(3, 2), .model_times = 100};
  const auto exact = static_cast<double>(train(setup)[0].sent_bytes);
  setup.wire = {.gather = int8, .reduce = int8};
  const auto encoded = static_cast<double>(train(setup)[0].sent_bytes);
  CHECK(encoded <= 0.52 * exact);
  CHECK(encoded > 0.4 * exact);
}

TEST_CASE("wire formats that could not be used are refused") {
  CHECK_THAT(message_of(2, {.stage = 2, .wire = {.gather = int8}}), Contains("B1005") && Contains("below stage 3"));
  CHECK_THAT(message_of(2, {.wire = {.reduce = int8, .across = int4}}),
             Contains("B1005") && Contains("ranks send their own gradients only"));
  CHECK(message_of(2, {.stage = 0, .wire = {.reduce = int8, .across = int4}}).empty());
  CHECK(message_of(1, {.stage = 2, .wire = {.gather = int8, .reduce = int8}}).empty());
}
