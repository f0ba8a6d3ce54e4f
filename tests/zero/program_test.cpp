#include <catch2/catch.hpp>
#include <fstream>
#include <sstream>

#include "zero/compile.h"

using namespace ballast;

namespace {

Program tiny_program(int stage, Tier state, std::size_t units = 3) {
  Model model;
  for (std::size_t i = 0; i < units; ++i)
    model.units.push_back({.name = "h", .tensors = {{"weight", {300}}}});
  const Placement placement = placement_of_stage(stage, 2, state);
  const Layout layout = make_layout(model, placement.shards, 128);
  return compile({.model = model, .layout = layout, .placement = placement, .state_bytes_per_tile = 1280});
}

std::string read_file(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
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

TEST_CASE("an operation waits only for earlier ones") {
  for (const int stage : {0, 1, 2, 3}) {
    for (const Tier tier : {Tier::host, Tier::nvme}) {
      const Program program = tiny_program(stage, tier);
      for (std::size_t i = 0; i < program.ops.size(); ++i) {
        for (const std::size_t before : program.ops[i].after)
          CHECK(before < i);
      }
    }
  }
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
