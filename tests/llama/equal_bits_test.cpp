// A Llama trains to the same bits wherever its state is, at every stage. The hidden case tries all combinations:
//
//   test_llama "[.all-equal]"
#include <catch2/catch.hpp>

#include "tests/llama/training_rig.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

struct Tiers {
  Tier parameters, gradients, state;
};

struct Cut {
  std::size_t tile;
  Schedule schedule;
};

using enum Tier;
const std::vector<Tiers> all_tiers = {{device, device, device}, {device, device, host}, {device, host, nvme},
                                      {host, device, host},     {host, host, nvme},     {nvme, host, nvme}};

const std::vector<Cut> all_cuts = {{128, {.prefetch = 0, .staging_slots = 1}},
                                   {4096, {.prefetch = 2}},
                                   {std::size_t{1} << 20, {.prefetch = 1, .staging_slots = 4, .kept_records = 2}}};

std::vector<TrainingOptions> all_options(const TrainingOptions& base, const std::vector<Cut>& cuts) {
  std::vector<TrainingOptions> all;
  for (const int stage : {0, 1, 2, 3}) {
    for (const Tiers& tiers : all_tiers) {
      if (stage < 3 && tiers.parameters != device) continue;
      for (const Cut& cut : cuts) {
        TrainingOptions options = base;
        options.stage = stage;
        options.parameters = Spread(tiers.parameters);
        options.gradients = Spread(tiers.gradients);
        options.state = Spread(tiers.state);
        options.tile_elements = cut.tile;
        options.schedule = cut.schedule;
        all.push_back(options);
      }
    }
  }
  TrainingOptions mixed = base;
  mixed.parameters = {0.4, 0.3, 0.3};
  mixed.gradients = {0.5, 0.5, 0.0};
  mixed.state = {0.3, 0.3, 0.4};
  all.push_back(mixed);
  return all;
}

benchmarks::RunOptions reference_of(benchmarks::RunOptions run) {
  run.training.stage = 0;
  return run;
}

void check_all_equal(const benchmarks::RunOptions& run, std::size_t ranks, const std::vector<TrainingOptions>& all) {
  const Outcome expected = train_llama(reference_of(run), ranks);
  REQUIRE(expected.steps.size() == run.steps);
  for (const TrainingOptions& options : all) {
    CAPTURE(ranks, options.stage, options.parameters.fractions(), options.gradients.fractions(),
            options.state.fractions(), options.tile_elements, options.micro_steps, options.max_norm,
            options.schedule.prefetch, options.schedule.update_in_backward);
    benchmarks::RunOptions other = run;
    other.training = options;
    CHECK(train_llama(other, ranks) == expected);
  }
}

}  // namespace

TEST_CASE("a Llama trains to the same bits at every stage and on all tiers") {
  for (const std::size_t ranks : {1u, 2u, 3u}) {
    benchmarks::RunOptions run = tiny_run();
    run.training.micro_steps = ranks == 2 ? 3 : 1;
    run.training.gradient_format = ranks == 1 ? GradientFormat::fp32 : GradientFormat::bf16;
    run.training.max_norm = ranks == 3 ? 0.5 : optim::no_clipping;
    check_all_equal(run, ranks, all_options(run.training, {all_cuts[ranks - 1]}));
  }
}

TEST_CASE("a Llama with an untied head, in fp32, or updated in the backward pass, trains to the same bits") {
  benchmarks::RunOptions run = tiny_run();
  run.model.tied = false;
  run.training.state = Tier::nvme;
  check_all_equal(run, 2, {run.training});
  run.model.dtype = DType::fp32;
  run.training.state = Tier::host;
  check_all_equal(run, 2, {run.training});
  run.training.schedule.update_in_backward = true;
  check_all_equal(run, 2, {run.training});
}

TEST_CASE("a Llama trains to the same bits where all micro-steps go through a layer before the next one") {
  benchmarks::RunOptions run = tiny_run();
  run.model.tied = false;  // a tied table sums in another order
  run.training.micro_steps = 3;
  for (const std::size_t ranks : {1u, 3u}) {
    run.training.max_norm = 0.5;
    std::vector<TrainingOptions> all = all_options(run.training, {all_cuts[ranks % 3]});
    for (TrainingOptions& options : all)
      options.schedule.layer_major = true;
    check_all_equal(run, ranks, all);
    run.training.max_norm = optim::no_clipping;
    for (TrainingOptions& options : all) {
      options.max_norm = optim::no_clipping;
      options.schedule.update_in_backward = true;
    }
    check_all_equal(run, ranks, all);
  }
}

TEST_CASE("the number of threads changes no bit") {
  benchmarks::RunOptions run = tiny_run();
  run.model = {.vocabulary = 256, .hidden = 96, .layers = 1, .heads = 3, .tied = true};
  run.batch.context = 150;
  const auto backend = kernels::cpu_backend({.threads = 1});
  std::vector<Outcome> outcomes;
  for (const int threads : {1, 2, 5}) {
    const auto maths = llama::cpu_maths(threads);
    outcomes.push_back(outcome_of(run, *lone_communicator(*backend), *maths));
  }
  CHECK(outcomes[1] == outcomes[0]);
  CHECK(outcomes[2] == outcomes[0]);
}

TEST_CASE("the loss of a Llama falls") {
  benchmarks::RunOptions run = tiny_run();
  run.steps = 60;
  const Outcome outcome = train_llama(run, 2);
  CHECK(outcome.steps.front().first > 5.0);
  CHECK(outcome.steps.back().first < 3.2);
}

TEST_CASE("a Llama trains to the same bits in every combination of options", "[.all-equal]") {
  for (const std::size_t ranks : {1u, 2u, 3u, 4u}) {
    for (const std::size_t micro_steps : {1u, 3u}) {
      for (const double max_norm : {optim::no_clipping, 0.5}) {
        benchmarks::RunOptions run = tiny_run();
        run.steps = 50;
        run.training.micro_steps = micro_steps;
        run.training.max_norm = max_norm;
        check_all_equal(run, ranks, all_options(run.training, all_cuts));
      }
    }
  }
}
