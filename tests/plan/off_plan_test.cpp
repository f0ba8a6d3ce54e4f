// Tests of off-plan steps: the operations that an engine runs are joined to a program, and verified like any other.
#include <ballast/error.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <random>

#include "tests/plan/off_plan_program.h"
#include "tests/plan/plan_rig.h"
#include "tests/plan/spreads.h"
#include "tests/plan/verify.h"
#include "tests/plan/without.h"
#include "tests/sanitizer.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

std::vector<Placement> placements(std::size_t shards, std::size_t replicas) {
  std::vector<Placement> all;
  for (const Reduction reduction : {Reduction::each, Reduction::boundary}) {
    all.push_back({shards, replicas, true, reduction, device, device, device});
    all.push_back({shards, replicas, true, reduction, device, host, nvme});
    all.push_back({shards, replicas, false, reduction, device, device, nvme});
    all.push_back({shards, replicas, false, reduction, host, host, host});
    all.push_back({shards, replicas, false, reduction, nvme, device, nvme});
    all.push_back({shards, replicas, false, reduction, {0.4, 0.3, 0.3}, {0.5, 0.5, 0}, {0.2, 0.2, 0.6}});
  }
  return all;
}

std::size_t backward_uses(const Trace& visits, std::size_t unit) {
  return static_cast<std::size_t>(std::ranges::count_if(
      visits, [&](const Visit& visit) { return visit.unit == unit && visit.phase == Phase::backward; }));
}

// A step that follows its program for a while, and then uses any units in any order.
class AnyStep {
 public:
  AnyStep(const CompiledPlan& plan, std::uint32_t seed) : random_(seed), input_(plan.input()) {
    const Trace trace = trace_of(input_);
    const std::size_t steps = pick(input_.micro_steps);
    std::size_t follows = steps * trace.size() + pick(trace.size() + 1);
    while (follows > 0 && trace[(follows - 1) % trace.size()].held)
      --follows;
    for (std::size_t i = 0; i < follows; ++i)
      step_.visits.push_back(trace[i % trace.size()]);
    step_.by_program = follows;
    for (std::size_t uses = pick(2 * trace.size()) + (follows == 0 ? 1 : 0); uses > 0; --uses)
      add_use();
  }

  std::vector<std::string> problems() {
    OffPlanProgram program(input_, step_.by_program);
    for (const Trace& chain : chains_)
      program.add(chain);
    return program.finish_and_verify();
  }

 private:
  std::size_t pick(std::size_t below) { return random_() % below; }

  void add_use() {
    const std::size_t unit = pick(input_.model.units.size());
    const Phase phase = pick(2) == 0 ? Phase::forward : Phase::backward;
    const bool exact = input_.gathers_codes() && phase == Phase::forward && pick(2) == 0;
    const Trace chain = visits_of(input_.model, unit, phase, exact);
    for (const Visit& visit : chain) {
      if (visit.phase == Phase::backward && backward_uses(step_.visits, visit.unit) > 0) input_.extra_sum_slots = true;
    }
    try {
      compile_visits(input_, step_, chain);
    } catch (const UsageError&) {
      REQUIRE(input_.schedule.update_in_backward);
      return;  // the unit is updated already
    }
    step_.visits.insert(step_.visits.end(), chain.begin(), chain.end());
    chains_.push_back(chain);
  }

  std::mt19937 random_;
  CompileInput input_;
  OffPlanStep step_;
  std::vector<Trace> chains_;
};

}  // namespace

TEST_CASE("an off-plan step has no faults for any sequence of uses") {
  std::uint32_t seed = 0;
  Sweep sweep(5);
  for (const Model& model : {plain_model(3), odd_model(), matrix_model()}) {
    for (const auto& [shards, replicas] : {std::pair{1, 1}, std::pair{2, 1}, std::pair{1, 3}, std::pair{3, 2}}) {
      for (const Placement& placement :
           placements(static_cast<std::size_t>(shards), static_cast<std::size_t>(replicas))) {
        for (const Schedule& schedule :
             {Schedule{.prefetch = 0, .staging_slots = 1}, Schedule{.prefetch = 2, .kept_records = 3},
              Schedule{.kept_records = 100}, Schedule{.kept_records = 1, .update_in_backward = true}}) {
          for (const std::size_t micro_steps : {1u, 3u}) {
            if ((schedule.update_in_backward && micro_steps > 1) || !sweep.takes_next()) continue;
            const bool gathers_codes = !placement.full_parameters && shards > 1 && seed % 3 == 0;
            PlanSetup setup{.model = model,
                            .placement = placement,
                            .rank = static_cast<std::size_t>(shards - 1),
                            .micro_steps = micro_steps,
                            .schedule = schedule,
                            .wire = {.gather = gathers_codes ? WireFormat::int8 : WireFormat::exact},
                            .full_records = seed % 2 == 0,
                            .host_is_device = seed / 2 % 2 == 0};
            if (has_matrices(model)) setup = with_muon(setup);
            const CompiledPlan plan = plan_of(setup);
            CAPTURE(model.units.size(), shards, replicas, placement.full_parameters,
                    static_cast<int>(placement.reduction), placement.parameters.fractions(),
                    placement.gradients.fractions(), placement.state.fractions(), schedule.prefetch,
                    schedule.kept_records, schedule.update_in_backward, micro_steps, seed);
            CHECK(AnyStep(plan, seed++).problems() == std::vector<std::string>{});
          }
        }
      }
    }
  }
}

namespace {

constexpr Visit forward(std::size_t unit) { return {unit, Phase::forward}; }
constexpr Visit backward(std::size_t unit) { return {unit, Phase::backward}; }

struct Sample {
  PlanSetup setup;
  std::size_t follows;
  Trace uses;
};

// Returns steps that use units in another order, twice, or not at all, and never the one that the program has prepared.
std::vector<Sample> off_plan_samples() {
  PlanSetup nvme_state{.model = plain_model(4), .placement = placement_of_stage(3, 2), .micro_steps = 2};
  nvme_state.placement.state = nvme;
  nvme_state.schedule = {.staging_slots = 3, .kept_records = 1};
  PlanSetup on_host{.model = plain_model(4), .placement = {2, 2, false, Reduction::each, host, host, host}};
  PlanSetup full{.model = plain_model(4), .placement = placement_of_stage(1, 3)};
  full.placement.reduction = Reduction::boundary;
  PlanSetup in_backward{.model = plain_model(4), .placement = placement_of_stage(3, 2)};
  in_backward.placement.parameters = in_backward.placement.state = nvme;
  in_backward.schedule.update_in_backward = true;
  return {{nvme_state, 13, {backward(0), forward(3), backward(1)}},
          {on_host, 5, {backward(0), backward(3)}},
          {full, 5, {backward(0), backward(3)}},
          {in_backward, 5, {backward(0), backward(1)}}};
}

CompileInput input_of(const CompiledPlan& plan) {
  CompileInput input = plan.input();
  input.extra_sum_slots = true;
  return input;
}

}  // namespace

TEST_CASE("no operation of an off-plan list is superfluous") {
  for (const Sample& sample : off_plan_samples()) {
    const CompiledPlan plan = plan_of(sample.setup);
    OffPlanProgram step(input_of(plan), sample.follows);
    const std::size_t begin = step.size();
    for (const Visit& visit : sample.uses)
      step.add({visit});
    const Program program = step.finish();
    REQUIRE(step.verify(program) == std::vector<std::string>{});
    for (std::size_t i = begin; i < step.end_of_step(); ++i) {
      if (program.ops[i].kind == OpKind::meet) continue;  // it is about other ranks
      INFO("without " << name(program.ops[i].kind) << ", operation " << i << " of " << sample.follows);
      CHECK_FALSE(step.verify(without(program, i)).empty());
    }
  }
}

TEST_CASE("units that are used in turns off plan are gathered once, and the one that was used last stays longest") {
  const CompiledPlan plan = plan_of({.model = plain_model(4), .placement = placement_of_stage(3, 2)});  // two units fit
  const auto gathers = [&](const Trace& uses) {
    OffPlanStep step;
    std::ptrdiff_t found = 0;
    for (const Visit& use : uses)
      found += std::ranges::count(compile_visits(plan.input(), step, {use}), OpKind::gather, &Op::kind);
    return found;
  };
  CHECK(gathers({forward(0), forward(1), forward(0), forward(1)}) == 2);
  CHECK(gathers({forward(0), forward(1), forward(0), forward(2), forward(0)}) == 3);
  CHECK(gathers({forward(0), forward(1), forward(0), forward(2), forward(1)}) == 4);
}

TEST_CASE("a unit that was updated in the backward pass cannot be used again in that step") {
  const Sample sample = off_plan_samples()[3];
  const CompiledPlan plan = plan_of(sample.setup);
  OffPlanStep step{.visits = {forward(0), forward(1), forward(2), forward(3), backward(3), backward(0)},
                   .by_program = 5};
  for (const Visit& visit : {forward(3), backward(3), backward(0)}) {
    CHECK_THROWS_WITH(compile_visits(plan.input(), step, {visit}),
                      Catch::Contains("B1007") && Catch::Contains("unit h." + std::to_string(visit.unit)) &&
                          Catch::Contains(std::string(name(visit.phase))));
  }
  CHECK_NOTHROW(compile_visits(plan.input(), step, {backward(1)}));
}

TEST_CASE("a unit that the trace never visits has memory too") {
  PlanSetup setup{.model = odd_model(), .placement = placement_of_stage(3, 2)};
  setup.trace = {forward(4), backward(4)};
  const CompiledPlan plan = plan_of(setup);
  OffPlanProgram step(input_of(plan), 1);
  for (const Phase phase : {Phase::forward, Phase::backward}) {
    for (std::size_t unit = 0; unit < setup.model.units.size(); ++unit)
      step.add(visits_of(setup.model, unit, phase));
  }
  CHECK(step.finish_and_verify() == std::vector<std::string>{});
}
