#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <fstream>
#include <set>
#include <sstream>

#include "zero/compile.h"

using namespace ballast;

namespace {

Program tiny_program(int stage, Tier state, std::size_t units = 3) {
  Model model;
  for (std::size_t i = 0; i < units; ++i) {
    model.units.push_back({.name = "h", .tensors = {{"weight", {300}}}});
  }
  const Placement placement = placement_of_stage(stage, 2, state);
  const Layout layout = make_layout(model, placement.shards, 128);
  return compile({.model = model, .layout = layout, .placement = placement, .state_bytes_per_tile = 1280});
}

std::string read_file(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

bool writes(const Op& op, std::size_t slot) { return op.to.slot == slot || op.state.slot == slot; }

// Whether one of the two writes a slot that the other reads or writes.
bool conflict(const Op& a, const Op& b) {
  const auto touched_by = [](const Op& writer, const Op& other) {
    return std::ranges::any_of(std::array{other.from.slot, other.to.slot, other.state.slot},
                               [&](std::size_t slot) { return slot != none && writes(writer, slot); });
  };
  return touched_by(a, b) || touched_by(b, a);
}

const std::string golden = BALLAST_SOURCE_DIR "/tests/zero/golden/";

}  // namespace

TEST_CASE("characteristic programs read as they are kept (mend them with: test_zero '[write-golden]')") {
  CHECK(to_text(tiny_program(0, Tier::host)) == read_file(golden + "stage0_host.txt"));
  CHECK(to_text(tiny_program(2, Tier::host)) == read_file(golden + "stage2_host.txt"));
  CHECK(to_text(tiny_program(3, Tier::nvme)) == read_file(golden + "stage3_nvme.txt"));
}

TEST_CASE("write the golden programs", "[.][write-golden]") {
  CHECK(std::ofstream(golden + "stage0_host.txt") << to_text(tiny_program(0, Tier::host)));
  CHECK(std::ofstream(golden + "stage2_host.txt") << to_text(tiny_program(2, Tier::host)));
  CHECK(std::ofstream(golden + "stage3_nvme.txt") << to_text(tiny_program(3, Tier::nvme)));
}

TEST_CASE(
    "an operation waits for earlier ones only, and for all that touch its slots before it writes or after they do") {
  for (const int stage : {0, 1, 2, 3}) {
    for (const Tier tier : {Tier::host, Tier::nvme}) {
      CAPTURE(stage, static_cast<int>(tier));
      const std::vector<Op> ops = tiny_program(stage, tier).ops;
      std::vector<std::set<std::size_t>> awaited(ops.size());  // directly or through others
      for (std::size_t i = 0; i < ops.size(); ++i) {
        for (const std::size_t before : ops[i].after) {
          REQUIRE(before < i);
          awaited[i].insert(before);
          awaited[i].insert(awaited[before].begin(), awaited[before].end());
        }
        for (std::size_t before = 0; before < i; ++before) {
          if (conflict(ops[before], ops[i])) {
            INFO(before << " and " << i);
            CHECK(awaited[i].contains(before));
          }
        }
      }
    }
  }
}

TEST_CASE("what cannot be compiled is refused with what is wrong") {
  const auto compiled = [](const Model& model, Placement placement, std::size_t micro_steps) {
    const Layout layout = make_layout(model, placement.shards, 128);
    return compile({.model = model, .layout = layout, .placement = placement, .micro_steps = micro_steps});
  };
  const Unit unit{.name = "h.0", .tensors = {{"weight", {300}}}};
  const Unit other{.name = "h.1", .dtype = DType::fp16, .tensors = {{"weight", {300}}}};
  const Placement placement = placement_of_stage(3, 2, Tier::host);
  CHECK_THROWS_WITH(compiled({}, placement, 1), Catch::Contains("B1001") && Catch::Contains("at least one unit"));
  CHECK_THROWS_WITH(compiled({{unit, other}}, placement, 1), Catch::Contains("unit h.0 is in bf16, unit h.1 in fp16"));
  CHECK_THROWS_WITH(compiled({{unit}}, placement, 0), Catch::Contains("0 micro-steps"));
  Placement no_room = placement;
  no_room.gathered_units = 0;
  CHECK_THROWS_WITH(compiled({{unit}}, no_room, 1), Catch::Contains("0 gathered units"));
  CHECK_THROWS_WITH(make_layout({{unit}}, 0, 128), Catch::Contains("at least one shard"));
  CHECK_THROWS_WITH(make_layout({{unit}}, 1, 100), Catch::Contains("a multiple of 128"));
  CHECK_THROWS_WITH(placement_of_stage(4, 2, Tier::host), Catch::Contains("stage 4"));
}

TEST_CASE("a higher stage and a lower tier need less memory") {
  std::size_t before = SIZE_MAX;
  for (const int stage : {0, 1, 2, 3}) {
    const std::size_t bytes = memory_bytes(tiny_program(stage, Tier::host, 8));
    CHECK(bytes < before);
    CHECK(memory_bytes(tiny_program(stage, Tier::nvme, 8)) < bytes);
    before = bytes;
  }
}
