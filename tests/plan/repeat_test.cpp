// Tests of updates that are made before the norm is known, and made again or undone after it.
#include <algorithm>
#include <catch2/catch.hpp>

#include "tests/plan/off_plan_program.h"
#include "tests/plan/plan_rig.h"
#include "tests/plan/spreads.h"
#include "tests/plan/verify.h"
#include "tests/plan/without.h"
#include "tests/sanitizer.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

using List = std::vector<Op> (*)(const CompileInput& input);
constexpr std::array lists{std::pair{"repeat", List{compile_repeat}}, std::pair{"undo", List{compile_undo}}};

PlanSetup run_on_drives(std::size_t ranks, const Spread& parameters) {
  PlanSetup setup{.model = odd_model(), .placement = placement_of_stage(3, ranks)};
  setup.placement.parameters = parameters;
  setup.placement.state = nvme;
  setup.schedule = {.staging_slots = 3, .kept_records = 1};
  setup.full_records = true;
  return setup;
}

// Returns the units that a program updates before its agreement.
std::vector<std::size_t> early_units(const Program& program) {
  std::vector<std::size_t> units;
  for (const Op& op : program.ops) {
    if (op.kind == OpKind::agree) break;
    if (op.kind == OpKind::update && op.tile == 0) units.push_back(op.unit);
  }
  return units;
}

}  // namespace

TEST_CASE("updates that are made again, or undone, have no faults") {
  Sweep sweep(3);
  std::size_t early = 0;
  std::size_t programs = 0;
  for (const Model& model : {plain_model(1), plain_model(4), odd_model()}) {
    for (const auto& [shards, replicas] : {std::pair{1u, 1u}, std::pair{2u, 1u}, std::pair{3u, 2u}}) {
      for (const Spread& parameters : {Spread{}, Spread{host}, Spread{nvme}, Spread{0.4, 0.3, 0.3}}) {
        for (const Spread& state : {Spread{nvme}, Spread{0.2, 0.2, 0.6}}) {
          for (const Schedule& schedule :
               {Schedule{.prefetch = 0, .staging_slots = 1}, Schedule{.staging_slots = 3, .kept_records = 2},
                Schedule{.prefetch = 3, .kept_records = 100, .overlap_gathers = true}}) {
            for (const std::size_t micro_steps : {1u, 2u}) {
              for (const bool host_is_device : {false, true}) {
                if (!sweep.takes_next()) continue;
                PlanSetup setup = run_on_drives(shards, parameters);
                setup.model = model;
                setup.placement.replicas = replicas;
                setup.placement.state = state;
                setup.placement.gradients = programs % 2 == 0 ? device : host;
                setup.placement.reduction = programs++ % 3 == 0 ? Reduction::boundary : Reduction::each;
                setup.micro_steps = micro_steps;
                setup.schedule = schedule;
                setup.host_is_device = host_is_device;
                const CompiledPlan plan = plan_of(setup);
                for (const auto& [name, list] : lists) {
                  CAPTURE(name, model.units.size(), shards, replicas, parameters.fractions(), state.fractions(),
                          schedule.prefetch, micro_steps, host_is_device);
                  OffPlanProgram step = OffPlanProgram::with_agreement(plan.input());
                  if (!step.is_early()) continue;
                  CHECK(step.verify(step.finish(list(plan.input()))) == std::vector<std::string>{});
                  ++early;
                }
              }
            }
          }
        }
      }
    }
  }
  CHECK(early > 200);
}

TEST_CASE("no operation by which updates are made again is superfluous") {
  for (const Spread& parameters : {Spread{}, Spread{host}, Spread{nvme}}) {
    const CompiledPlan plan = plan_of(run_on_drives(2, parameters));
    for (const auto& [name, list] : lists) {
      OffPlanProgram step = OffPlanProgram::with_agreement(plan.input());
      REQUIRE(step.is_early());
      const std::size_t begin = step.size();
      const Program program = step.finish(list(plan.input()));
      for (std::size_t i = begin; i < step.end_of_step(); ++i) {
        if (program.ops[i].kind == OpKind::download) continue;  // the gradients of the last tiles are still on the host
        INFO(name << " without " << ballast::name(program.ops[i].kind) << ", operation " << i - begin);
        CHECK_FALSE(step.verify(without(program, i)).empty());
      }
    }
  }
}

TEST_CASE("a unit is updated before the norm only where the update can be undone") {
  const auto units_of = [](const PlanSetup& setup) { return early_units(plan_of(setup).program()); };
  PlanSetup setup = run_on_drives(2, device);
  setup.model = plain_model(3);
  CHECK(units_of(setup) == std::vector<std::size_t>{2, 1, 0});
  SECTION("records that end with the training have one place") { setup.full_records = false; }
  SECTION("the host keeps no old state") { setup.placement.state = host; }
  SECTION("a trainer may look at full parameters between backward and step") {
    setup.placement = placement_of_stage(2, 2);
    setup.placement.state = nvme;
  }
  SECTION("the caller wants no repeated steps") { setup.schedule.most_repeats = 0; }
  CHECK(units_of(setup).empty());
}

TEST_CASE("a unit that is used after its last gradients is updated after the norm") {
  PlanSetup setup = run_on_drives(2, device);
  setup.model = plain_model(3);
  setup.trace = declared_order(setup.model);
  setup.trace.push_back({1, Phase::forward});
  const CompiledPlan plan = plan_of(setup);
  CHECK(early_units(plan.program()) == std::vector<std::size_t>{2, 0});
  CHECK(verify(plan.input(), plan.program()) == std::vector<std::string>{});
}

TEST_CASE("the order of updates changes no slot") {
  PlanSetup setup = run_on_drives(2, host);
  const std::vector<Slot> early = plan_of(setup).program().slots;
  setup.schedule.most_repeats = 0;
  CHECK(plan_of(setup).program().slots == early);
}
