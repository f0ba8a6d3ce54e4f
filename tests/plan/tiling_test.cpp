// Tests of the sizes of tiles where the caller asks for none.
#include "zero/plan/layout.h"

#include <algorithm>
#include <catch2/catch.hpp>

#include "tests/plan/large_models.h"
#include "tests/plan/plan_rig.h"
#include "tests/plan/spreads.h"
#include "tests/plan/verify.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

constexpr std::size_t ki = 1024, mi = ki * ki;

PlanSetup mixed() {
  PlanSetup setup{.model = odd_model(3000), .placement = placement_of_stage(3, 2), .tile_elements = 0};
  setup.placement.state = {0.4, 0.3, 0.3};
  return setup;
}

}  // namespace

TEST_CASE("on the device, all that a rank keeps of a unit is one tile, and one operation updates it") {
  for (const int stage : {0, 2, 3}) {
    const CompiledPlan plan =
        plan_of({.model = llama(llama_8b), .placement = placement_of_stage(stage, 8), .tile_elements = 0});
    for (std::size_t unit = 0; unit < plan.model().units.size(); ++unit) {
      const UnitLayout& layout = plan.layout().units[unit];
      REQUIRE(layout.tiles.size() == 1);
      CHECK(layout.tiles[0] == Range{0, layout.trained.shard});
      CHECK(std::ranges::count_if(plan.program().ops,
                                  [&](const Op& op) { return op.kind == OpKind::update && op.unit == unit; }) == 1);
    }
  }
}

TEST_CASE("elsewhere a tile has 256 Ki elements, and 2 Mi where a rank has many of them") {
  CHECK(automatic_tile(plain_model(3), 1) == 256 * ki);
  CHECK(automatic_tile(plain_model(1, 96 * mi), 1) == 512 * ki);
  CHECK(automatic_tile(plain_model(1, 96 * mi), 2) == 256 * ki);
  CHECK(automatic_tile(llama(llama_70b), 8) == 2 * mi);
  for (const Spread& state : {host, nvme}) {
    Placement placement = placement_of_stage(3, 8);
    placement.state = state;
    for (const UnitLayout& unit : lay_out(llama(llama_70b), placement, 0).units) {
      CHECK(unit.tile_elements <= 2 * mi);
      CHECK(unit.device_elements == 0);
    }
  }
}

TEST_CASE("a requested size of tiles holds in all tiers") {
  for (const UnitLayout& unit : lay_out(llama(llama_8b), placement_of_stage(3, 8), 256 * ki).units) {
    CHECK(unit.tile_elements <= 256 * ki);
    CHECK(std::ranges::all_of(unit.tiles, [](const Range& tile) { return tile.count <= 256 * ki; }));
  }
}

TEST_CASE("where state lies in several tiers, the device's part is one tile, and the parts are as large as requested") {
  const CompiledPlan plan = plan_of(mixed());
  std::array<double, tier_count> elements{};
  const auto residences = reside(plan.placement(), plan.layout());
  for (std::size_t unit = 0; unit < residences.size(); ++unit) {
    const UnitLayout& layout = plan.layout().units[unit];
    REQUIRE(residences[unit].state.size() == layout.tiles.size());
    std::size_t next = 0;
    for (std::size_t tile = 0; tile < layout.tiles.size(); ++tile) {
      const Tier tier = residences[unit].state[tile];
      CHECK(layout.tiles[tile].first == next);
      CHECK((tier == Tier::device) == (tile == 0 && layout.device_elements > 0));
      CHECK(layout.tiles[tile].count <= (tier == Tier::device ? layout.device_elements : layout.tile_elements));
      elements[static_cast<std::size_t>(tier)] += static_cast<double>(layout.tiles[tile].count);
      next = layout.tiles[tile].end();
    }
    CHECK(next == layout.trained.shard);
  }
  const double all = elements[0] + elements[1] + elements[2];
  for (std::size_t tier = 0; tier < tier_count; ++tier) {
    CHECK(elements[tier] == Approx(plan.placement().state.fractions()[tier] * all).margin(1.5 * 256 * ki));
  }
}

TEST_CASE("programs with tiles of different sizes are right") {
  for (const bool full_records : {false, true}) {
    for (const bool update_in_backward : {false, true}) {
      PlanSetup setup = mixed();
      setup.full_records = full_records;
      setup.schedule.update_in_backward = update_in_backward;
      const CompiledPlan plan = plan_of(setup);
      CHECK(verify(plan.input(), plan.program()) == std::vector<std::string>{});
    }
  }
}
