#include "zero/plan/layout.h"

#include <catch2/catch.hpp>
#include <numeric>

#include "tests/plan/plan_rig.h"

using namespace ballast;
using namespace ballast::testing;

TEST_CASE("every element of a tensor has one owner, and its place in the shard maps back to it") {
  const Model model = odd_model();
  for (const std::size_t shards : {1u, 2u, 3u, 5u, 64u}) {
    const Layout layout = make_layout(model, shards, 256);
    for (std::size_t u = 0; u < model.units.size(); ++u) {
      const Unit& unit = model.units[u];
      for (std::size_t tensor = 0; tensor < unit.tensors.size(); ++tensor) {
        const std::size_t elements = unit.tensors[tensor].elements();
        std::size_t next = 0;
        for (const TensorPart& part : owners_of(unit, layout.units[u], tensor, {0, elements})) {
          CHECK(part.range.first == next);
          next = part.range.end();
          const Section& section = unit.tensors[tensor].frozen ? layout.units[u].frozen : layout.units[u].trained;
          const auto back = tensors_in(unit, layout.units[u], section, part.rank, {part.in_shard, part.range.count});
          REQUIRE(back.size() == 1);
          CHECK(back[0].tensor == tensor);
          CHECK(back[0].range == part.range);
          CHECK(back[0].in_shard == part.in_shard);
        }
        CHECK(next == elements);
      }
    }
  }
}

TEST_CASE("the owners of part of a tensor and the tensors in part of a shard have exact ranges") {
  const Model model{{{.name = "h", .tensors = {{"a", {200}}, {"b", {300}}}}}};
  const Layout layout = make_layout(model, 2, 128);  // a: 0..200, b: 256..556; shards of 384
  CHECK(layout.units[0].trained.shard == 384);
  const auto owners = owners_of(model.units[0], layout.units[0], 1, {100, 100});
  REQUIRE(owners.size() == 2);
  CHECK(owners[0].range == Range{100, 28});
  CHECK(owners[0].in_shard == 356);
  CHECK(owners[1].rank == 1);
  CHECK(owners[1].range == Range{128, 72});
  CHECK(owners[1].in_shard == 0);
  const auto tensors = tensors_in(model.units[0], layout.units[0], layout.units[0].trained, 0, {150, 200});
  REQUIRE(tensors.size() == 2);
  CHECK(tensors[0].range == Range{150, 50});
  CHECK(tensors[1].range == Range{0, 94});
}

TEST_CASE("tiles cover a shard, have equal size except the last, and are no larger than requested") {
  for (const std::size_t elements : {1u, 127u, 128u, 1000u, 5000u}) {
    for (const std::size_t most : {128u, 256u, 640u, 100'096u}) {
      const Layout layout = make_layout(plain_model(1, elements), 1, most);
      const UnitLayout& unit = layout.units[0];
      std::size_t next = 0;
      for (const Range& tile : unit.tiles) {
        CHECK(tile.first == next);
        CHECK(tile.count <= unit.tile_elements);
        CHECK(tile.first % 128 == 0);
        next = tile.end();
      }
      CHECK(next == unit.trained.shard);
      CHECK(unit.tile_elements <= most);
      CHECK(unit.tiles.size() == (unit.trained.shard + most - 1) / most);
    }
  }
}

TEST_CASE("tensors larger than 2^31 elements are cut like others") {
  const Layout layout = make_layout(plain_model(1, std::size_t{5} << 31), 3, std::size_t{1} << 20);
  const auto owners =
      owners_of(plain_model(1, std::size_t{5} << 31).units[0], layout.units[0], 0, {std::size_t{4} << 31, 10});
  REQUIRE(owners.size() == 1);
  CHECK(owners[0].rank == 2);
}

TEST_CASE("tier fractions hold to within one tile, and state is on no faster tier than its parameters") {
  const Layout layout = make_layout(plain_model(10, 100'000), 1, 1024);
  Placement placement{.full_parameters = false};
  placement.state = {0.25, 0.35, 0.4};
  std::array<std::size_t, tier_count> tiles{};
  std::size_t all = 0;
  for (const UnitResidence& unit : reside(placement, layout)) {
    for (const Tier tier : unit.state)
      ++tiles[static_cast<std::size_t>(tier)], ++all;
  }
  for (std::size_t tier = 0; tier < tier_count; ++tier) {
    CHECK(static_cast<double>(tiles[tier]) ==
          Approx(placement.state.fractions()[tier] * static_cast<double>(all)).margin(1.5));
  }
  placement.parameters = {0, 0.5, 0.5};
  for (const UnitResidence& unit : reside(placement, layout)) {
    for (const Tier tier : unit.state)
      CHECK(tier >= unit.parameters);
  }
}

TEST_CASE("a device alone keeps what the first units need, and ranks or drives have a part of each stretch of units") {
  const Layout layout = make_layout(plain_model(10, 100'000), 1, 1024);
  Placement placement{.full_parameters = false};
  placement.parameters = placement.gradients = {0.5, 0.5, 0};
  placement.state = {0.25, 0.75, 0};
  const auto tiers = [&] {
    std::string all;
    for (const UnitResidence& unit : reside(placement, layout)) {
      const auto on_device = std::ranges::count(unit.state, Tier::device);
      CHECK((on_device == 0 || unit.gradients == Tier::device));
      all += on_device > 0 ? 's' : unit.parameters == Tier::device ? 'p' : '-';
    }
    return all;
  };
  CHECK(tiers() == "ssspp-----");
  placement.state = {0.25, 0.5, 0.25};
  CHECK(tiers() == "s-s-s-s-s-");
}
