// Tests of how much memory a step takes for what is on its way: it does not grow with the largest unit more than needed.
#include <algorithm>
#include <catch2/catch.hpp>

#include "tests/plan/large_models.h"
#include "tests/plan/plan_rig.h"
#include "tests/plan/spreads.h"
#include "zero/plan/program_cost.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

constexpr std::size_t bf16_bytes(std::size_t elements) { return 2 * elements; }

std::size_t bytes_of(const CompiledPlan& plan, SlotRole role, Tier tier) {
  std::size_t bytes = 0;
  for (const Slot& slot : plan.program().slots) {
    if (slot.role == role && slot.tier == tier) bytes += slot.bytes;
  }
  return bytes;
}

PlanSetup alone_with_8b() {
  PlanSetup setup{.model = llama(llama_8b),
                  .placement = placement_of_stage(3, 1),
                  .tile_elements = 0,
                  .gradient_format = GradientFormat::bf16};
  setup.placement.gradients = setup.placement.state = host;
  return setup;
}

}  // namespace

TEST_CASE("gradients of uses take the memory of two neighbours, not twice that of the largest unit") {
  const CompiledPlan plan = plan_of(alone_with_8b());
  const std::vector<UnitLayout>& units = plan.layout().units;
  const std::size_t embedding = bf16_bytes(units.front().elements()), layer = bf16_bytes(units[1].elements());
  CHECK(embedding > 2 * layer);
  CHECK(bytes_of(plan, SlotRole::gradients, Tier::device) == embedding + layer);
}

TEST_CASE("a lone rank has no memory for sums on the device, if they have the format of gradients") {
  for (const bool in_backward : {false, true}) {
    PlanSetup setup = alone_with_8b();
    setup.schedule.update_in_backward = in_backward;
    const CompiledPlan plan = plan_of(setup);
    CHECK(bytes_of(plan, SlotRole::arriving, Tier::device) == 0);
  }
}

TEST_CASE("sums in another format than that of gradients pass to the host in parts of twelve tiles") {
  PlanSetup setup = alone_with_8b();
  setup.gradient_format = GradientFormat::fp32;
  const CompiledPlan plan = plan_of(setup);
  const std::vector<UnitLayout>& units = plan.layout().units;
  const std::size_t part = 12 * std::max(units.front().tile_elements, units[1].tile_elements) * sizeof(float);
  CHECK(bytes_of(plan, SlotRole::arriving, Tier::device) > part);
  CHECK(bytes_of(plan, SlotRole::arriving, Tier::device) <= 2 * part);
}

TEST_CASE("units that are held together have gradients apart, however many they are") {
  Model model = plain_model(5);
  model.units.push_back({.name = "head", .tensors = {{"b", {29}}}, .ties = {{"a", 0, 0}, {"b", 2, 0}, {"c", 4, 0}}});
  const CompiledPlan plan = plan_of({.model = model, .placement = placement_of_stage(3, 2)});
  std::vector<Piece> held;
  for (const Op& op : plan.program().ops) {
    if (op.kind != OpKind::use || op.phase != Phase::backward) continue;
    CHECK(std::ranges::none_of(held, [&](const Piece& other) { return overlap(other, op.to); }));
    held.push_back(op.to);
    if (held.size() == 4) break;
  }
  CHECK(held.size() == 4);
}
