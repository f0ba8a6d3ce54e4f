// Tests of off-plan steps: they give the bits of programs that were compiled for the same uses.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <catch2/catch.hpp>

#include "tests/sanitizer.h"
#include "tests/temporary_directory.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

using UsesByStep = std::vector<std::vector<Trace>>;

constexpr Visit forward(std::size_t unit) { return {unit, Phase::forward}; }
constexpr Visit backward(std::size_t unit) { return {unit, Phase::backward}; }

// Uses of odd_model(): 5 is tied to 0, 2 is frozen, 3 is empty.
const Trace unused{forward(0), forward(1), forward(5), backward(5), backward(0)};  // 4 never, 1 not backward
const Trace shared{forward(0),  forward(1),  forward(4),  forward(1),  forward(5),
                   backward(5), backward(1), backward(4), backward(1), backward(0)};
const Trace another{forward(4), forward(1), forward(0), forward(5), backward(1), backward(5), backward(0), backward(4)};
const Trace recomputed{forward(0),  forward(1), forward(4),  forward(5), backward(5), forward(4),
                       backward(4), forward(1), backward(1), forward(0), backward(0)};
const Trace in_parts{forward(0), forward(5),  backward(5), forward(1),
                     forward(4), backward(4), backward(1), backward(0)};
// The declared order holds until the program has summed gradients and added them to the norm. Then unit 4 gets more of
// them, and some units are not used backward.
const Trace late{forward(0),  forward(1),  forward(2),  forward(3),  forward(4), forward(5),
                 backward(5), backward(4), backward(1), backward(4), backward(0)};
const Trace no_backward{forward(0), forward(1), forward(2), forward(3), forward(4), forward(5)};

const std::map<std::string, Trace> orders{
    {"unused", unused},         {"shared", shared},     {"another", another},        {"late", late},
    {"recomputed", recomputed}, {"in parts", in_parts}, {"no backward", no_backward}};

const Trace no_backward_of_three{forward(0), forward(1), forward(2)};

// Returns the uses of a step's micro-steps as a program's trace.
Trace trace_of_step(const std::vector<Trace>& uses_of_step) {
  Trace trace;
  for (const Trace& uses : uses_of_step) {
    for (const Visit& use : uses) {
      const Trace visits = visits_of(odd_model(), use.unit, use.phase);
      trace.insert(trace.end(), visits.begin(), visits.end());
    }
  }
  return trace;
}

// Returns a setup that runs all uses of a step at stage 0 by a program that was compiled for them. They form one
// micro-step, which is scaled accordingly.
Setup planned_for(const std::vector<Trace>& uses_of_step, const Setup& off_plan) {
  Setup setup = off_plan;
  setup.placement = placement_of_stage(0, off_plan.placement.ranks());
  setup.placement.reduction = off_plan.placement.reduction;
  setup.schedule = {};
  setup.trace = trace_of_step(uses_of_step);
  setup.loss_scale = static_cast<double>(uses_of_step.size());
  setup.micro_steps = 1;
  return setup;
}

std::vector<std::size_t> on_demand(const std::vector<Outcome>& outcomes) {
  for (const Outcome& outcome : outcomes)
    CHECK(outcome.on_demand == outcomes[0].on_demand);
  return outcomes[0].on_demand;
}

void check_everywhere(Sweep& sweep, const Setup& with, const std::vector<std::size_t>& served) {
  const std::vector<Outcome> expected = train(planned_for(with.uses_by_step[0], with));
  CHECK(on_demand(expected) == std::vector<std::size_t>(with.steps, 0));
  for (Placement placement : placements(with.placement.shards)) {
    if (!sweep.takes_next()) continue;
    placement.reduction = with.placement.reduction;
    CAPTURE(placement.shards, placement.full_parameters, placement.parameters.fractions(),
            placement.gradients.fractions(), placement.state.fractions());
    Setup setup = with;
    setup.placement = placement;
    const std::vector<Outcome> outcomes = train(setup);
    check_same(expected, outcomes);
    CHECK(on_demand(outcomes) == served);
    if (with.micro_steps == 1) continue;  // otherwise there are slots for second sums from the start, and nothing grows
    for (const Outcome& outcome : outcomes)
      CHECK(outcome.reserved_bytes == outcome.first_planned_bytes);
  }
}

}  // namespace

TEST_CASE("an order that repeats is served on demand twice and then compiled, with the same bits", "[off-plan]") {
  using enum Reduction;
  Sweep sweep(11);
  for (const auto& [name, uses] : orders) {
    for (const auto& [ranks, reduction, micro_steps] :
         {std::tuple{1u, each, 1u}, std::tuple{2u, each, 1u}, std::tuple{2u, each, 3u}, std::tuple{2u, boundary, 3u}}) {
      CAPTURE(name, ranks, static_cast<int>(reduction), micro_steps);
      check_everywhere(sweep,
                       {.placement = {.shards = ranks, .reduction = reduction},
                        .micro_steps = micro_steps,
                        .schedule = {.prefetch = 2, .staging_slots = 3, .kept_records = 2},
                        .gradient_format = micro_steps > 1 ? GradientFormat::bf16 : GradientFormat::fp32,
                        .max_norm = 0.05,
                        .uses_by_step = {std::vector<Trace>(micro_steps, uses)}},
                       {1, 1, 0, 0});
    }
  }
}

TEST_CASE("orders that change at every step give the bits of programs compiled for each", "[off-plan]") {
  const UsesByStep uses_by_step{{shared},     {unused}, {plain_order(odd_model())}, {another}, {in_parts},
                                {recomputed}, {unused}};
  for (const std::size_t ranks : {1u, 2u}) {
    const TemporaryDirectory directory;
    const auto gradient_format = ranks == 1 ? GradientFormat::bf16 : GradientFormat::fp32;
    Setup planned{
        .placement = placement_of_stage(0, ranks), .gradient_format = gradient_format, .directory = directory.path()};
    planned.placement.state = Tier::nvme;
    Outcome expected;
    for (std::size_t step = 0; step < uses_by_step.size(); ++step) {  // each resumes where the last one ended
      planned.steps = step + 1;
      planned.uses_by_step = std::vector<std::vector<Trace>>(step + 1, uses_by_step[step]);
      planned.trace = trace_of_step(uses_by_step[step]);
      const Outcome outcome = train(planned)[0];
      CHECK(outcome.on_demand == std::vector<std::size_t>{0});
      expected.seen.push_back(outcome.seen[0]);
      expected.norms.push_back(outcome.norms[0]);
      expected.parameters = outcome.parameters;
    }
    for (const Placement& placement : placements(ranks)) {
      CAPTURE(ranks, placement.shards, placement.full_parameters, placement.parameters.fractions(),
              placement.gradients.fractions(), placement.state.fractions());
      const std::vector<Outcome> outcomes = train({.placement = placement,
                                                   .schedule = {.prefetch = 2, .kept_records = 3},
                                                   .gradient_format = gradient_format,
                                                   .steps = uses_by_step.size(),
                                                   .uses_by_step = uses_by_step});
      CHECK(on_demand(outcomes) == std::vector<std::size_t>{1, 1, 0, 1, 1, 1, 1});
      CHECK((outcomes[0].seen == expected.seen));
      CHECK(outcomes[0].norms == expected.norms);
      CHECK((outcomes[0].parameters == expected.parameters));
    }
  }
}

TEST_CASE("micro-steps of different orders, or fewer than planned, are never compiled", "[off-plan]") {
  Sweep sweep(3);
  for (const std::vector<Trace>& uses_of_step :
       {std::vector{unused, shared, plain_order(odd_model())}, std::vector{plain_order(odd_model()), another}}) {
    for (const Reduction reduction : {Reduction::each, Reduction::boundary}) {
      Placement placement{.shards = 2, .reduction = reduction};
      check_everywhere(sweep, {.placement = placement, .micro_steps = 3, .uses_by_step = {uses_of_step}}, {1, 1, 1, 1});
    }
  }
}

TEST_CASE("updates in the backward pass work in off-plan steps too", "[off-plan]") {
  Sweep sweep(5);
  const Trace once{forward(1), forward(4), forward(0), backward(4), forward(5), backward(5), backward(0)};
  const Trace fewer{forward(1), forward(4), backward(4)};
  for (const Trace& uses : {once, fewer, no_backward}) {
    for (const Reduction reduction : {Reduction::each, Reduction::boundary}) {
      check_everywhere(sweep,
                       {.placement = {.shards = 2, .reduction = reduction},
                        .schedule = {.staging_slots = 3, .kept_records = 2, .update_in_backward = true},
                        .uses_by_step = {{uses}}},
                       uses.size() == once.size() || reduction == Reduction::boundary
                           ? std::vector<std::size_t>{1, 1, 0, 0}
                           : std::vector<std::size_t>{1, 1, 1, 1});  // its program would lack the slot for a second sum
    }
  }
}

TEST_CASE("all ranks of a mesh of groups and replicas go off plan together", "[off-plan]") {
  Placement mesh = placement_of_stage(3, 2);
  mesh.replicas = 2;
  const Setup off_plan{.placement = mesh, .micro_steps = 2, .uses_by_step = {{shared, shared}}};
  Setup planned = off_plan;
  planned.trace = trace_of_step({shared});
  const std::vector<Outcome> expected = train(planned);
  CHECK(on_demand(expected) == std::vector<std::size_t>{0, 0, 0, 0});
  const std::vector<Outcome> outcomes = train(off_plan);
  check_same(expected, outcomes);
  CHECK(on_demand(outcomes) == std::vector<std::size_t>{1, 1, 0, 0});
}

TEST_CASE("a skipped off-plan step changes nothing, and names the parameter", "[off-plan]") {
  for (const Placement& placement : placements(2)) {
    const Setup off_plan{.placement = placement, .uses_by_step = {{shared}}, .poisoned_step = 1};
    const std::vector<Outcome> outcomes = train(off_plan);
    check_same(train(planned_for({shared}, off_plan)), outcomes);
    CHECK(outcomes[0].reasons[1] == "the gradients are not finite, first in w (unit h.0)");
    CHECK(outcomes[0].steps == 3);
  }
}

namespace {

// A training of three plain units on one rank, with gradients that the test gives.
struct LoneTrainer {
  explicit LoneTrainer(const TrainingOptions& options) : training(plain_model(3), *world, {optim::AdamW{}}, options) {
    training.initialize(initial_parameters());
  }
  void backward(std::size_t unit, float gradient) {
    const Lease lease = training.backward(unit);
    for (std::size_t i = 0; i < 300; ++i)
      set_value(lease.gradient(0), i, value_of(lease.gradient(0), i) + gradient);
  }

  std::unique_ptr<kernels::Backend> backend = kernels::cpu_backend({.threads = 1});
  std::unique_ptr<Communicator> world = lone_communicator(*backend);
  Training training;
};

}  // namespace

TEST_CASE("memory for a second sum of gradients is reserved when it is first needed", "[off-plan]") {
  for (const Tier gradients : {Tier::device, Tier::host}) {
    LoneTrainer alone({.stage = 3, .gradients = Spread(gradients), .state = Tier::host, .sums_micro_steps = true});
    const Ledger planned = alone.training.ledger();
    for (int step = 0; step < 4; ++step) {
      alone.backward(1, 3.0f);
      alone.backward(1, 4.0f);
      CHECK(alone.training.step().norm == Approx(7.0 * std::sqrt(300.0)));
    }
    const Ledger ledger = alone.training.ledger();  // on the device, a lone rank adds to the first sum
    CHECK(bytes_in(ledger, Tier::device) == bytes_in(planned, Tier::device));
    CHECK(bytes_in(ledger, Tier::host) == bytes_in(planned, Tier::host) + (gradients == Tier::host ? 2 * 1536 : 0));
    CHECK(alone.training.metrics().on_demand == 2);
  }
}

TEST_CASE("metrics count the steps that were served on demand", "[off-plan]") {
  LoneTrainer alone({.stage = 0});
  alone.backward(2, 1.0f);
  CHECK_THAT(to_text(alone.training.step().metrics), Contains("1 step was served on demand"));
  alone.training.step();
  const Metrics metrics = alone.training.metrics();
  CHECK(metrics.on_demand == 2);
  CHECK_THAT(to_text(metrics), Contains("2 steps were served on demand"));
}

TEST_CASE("leases must end before an off-plan step begins", "[off-plan]") {
  LoneTrainer alone({.stage = 3});
  {
    const Lease held = alone.training.forward(0);
    CHECK_THROWS_WITH(alone.training.forward(2), Contains("B1007") && Contains("unit h.2 in forward") &&
                                                     Contains("lease of unit h.0") &&
                                                     Contains("unit h.1 in forward, or"));
    CHECK_NOTHROW(alone.training.forward(1));
    CHECK_THROWS_WITH(alone.training.step(), Contains("B1007") && Contains("the end of all leases"));
  }
  const Lease held = alone.training.backward(0);
  CHECK_THROWS_WITH(alone.training.forward(1), Contains("B1007") && Contains("lease of unit h.0"));
}

TEST_CASE("a unit that was updated in backward is refused, and the step still succeeds", "[off-plan]") {
  LoneTrainer alone({.stage = 3, .schedule = {.update_in_backward = true}});
  alone.backward(1, 1.0f);
  CHECK_THROWS_WITH(alone.training.backward(1), Contains("B1007") && Contains("unit h.1") && Contains("updated"));
  CHECK_THROWS_WITH(alone.training.forward(1), Contains("B1007") && Contains("unit h.1"));
  alone.backward(0, 1.0f);
  CHECK_THROWS_WITH(alone.training.backward(1), Contains("B1007"));
  CHECK(alone.training.step().norm == Approx(std::sqrt(600.0)));
}

namespace {

// Runs two ranks that follow different orders, and returns each rank's error.
std::vector<std::string> failures_of(int stage, const Trace& first, const Trace& second) {
  return failures_of_ranks(2, [&](Communicator& world) {
    const Model model = plain_model(3);  // its units have one size, so that no collective is refused for that
    Training training(model, world, {optim::AdamW{}}, {.stage = stage});
    training.initialize(initial_parameters());
    SyntheticTrainer trainer(model, world.rank());
    trainer.run(training, 0);
    training.step();
    trainer.run(training, world.rank() == 0 ? first : second, 1);
    training.step();
    training.finish();
  });
}

}  // namespace

TEST_CASE("ranks that go off plan with different uses, or alone, all fail at once", "[off-plan]") {
  const Trace plain = plain_order(plain_model(3));
  const Trace swapped{forward(0), forward(2), forward(1), backward(2), backward(1), backward(0)};
  const Trace otherwise{forward(0), forward(2), forward(0), backward(2), backward(1), backward(0)};
  const Trace turned{forward(0), forward(1), forward(2), backward(2), backward(0), backward(1)};
  for (const int stage : {0, 1, 2, 3}) {
    for (const auto& [first, second] : {std::pair{plain, swapped}, std::pair{plain, turned}, std::pair{swapped, plain},
                                        std::pair{swapped, otherwise}, std::pair{plain, no_backward_of_three}}) {
      CAPTURE(stage);
      for (const std::string& failure : failures_of(stage, first, second)) {
        CHECK_THAT(failure, Contains("B1007") || Contains("another call") || Contains("B3301"));
        CHECK_THAT(failure, !Contains("B3302"));  // no rank waited until the timeout
      }
    }
  }
  const std::vector<std::string> alone = failures_of(3, plain, swapped);
  CHECK_THAT(alone[0] + alone[1], Contains("makes another call"));  // the rank that finds it first says so
  const std::vector<std::string> both = failures_of(3, swapped, otherwise);
  CHECK_THAT(both[0] + both[1], Contains("unit h.1 in forward") && Contains("unit h.0 in forward"));
}

// The sum that finds the slowest rank has as many integers with two copies of three shards as a rendezvous of two
// ranks.
TEST_CASE("a rendezvous does not match another call of the same length", "[off-plan]") {
  const std::vector<std::string> failures = failures_of_ranks(6, [](Communicator& world) {
    const Model model = plain_model(3);
    Training training(model, world, {optim::AdamW{}}, {.stage = 3, .replicas = 2});
    training.initialize(initial_parameters());
    SyntheticTrainer(model, world.rank()).run(training, 0);
    if (world.rank() < 3) training.forward(0);
    training.step();
    training.finish();
  });
  const std::string all = fmt::format("{}", fmt::join(failures, "\n"));
  CHECK_THAT(all, Contains("makes another call") && Contains("for an off-plan use"));
  CHECK_THAT(all, !Contains("calls step()"));
}
