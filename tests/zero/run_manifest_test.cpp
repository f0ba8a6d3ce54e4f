// Tests of the manifest of a run, which says what its records hold.
#include <catch2/catch.hpp>
#include <fstream>

#include "offload/run_directory.h"
#include "tests/plan/plan_rig.h"
#include "tests/temporary_directory.h"
#include "zero/runs/recorded_state.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

std::string described(const Model& model, const PlanOptions& options) { return describe(CompiledPlan(model, options)); }

PlanOptions options_of(int stage, std::size_t ranks) {
  return {.placement = placement_of_stage(stage, ranks), .tile_elements = 128, .rule = "AdamW"};
}

SavedCheckpoint read(const std::string& manifest) { return parse_run_manifest(manifest, "here"); }

std::string replaced(std::string text, const std::string& what, const std::string& with) {
  text.replace(text.find(what), what.size(), with);
  return text;
}

}  // namespace

// Files contain it. If it changes, older runs are taken over as those of other ranks, or refused.
TEST_CASE("a manifest has what the records of a run hold") {
  const std::string found = described(plain_model(1), options_of(3, 2));
  CHECK(
      found ==
      R"({"content": {"format":1,"groups":[],"layout":{"full_parameters":false,"own_values":0,"parameter_replicas":1,)"
      R"("replicas":1,"shards":2,"units":[{"tensors":["weight"],"tile_elements":128}]},"moments":{},"optimizer":"AdamW",)"
      R"("others":[],"outer_identity":"","own_step":false,"skipped":0,"step":0,"tensors":{"weight":{"dtype":"bfloat16",)"
      R"("format":"split","item_bytes":2,"momentum":false,"role":"trained","shape":[300],"steps":0,"variance":false}}},)"
      R"( "seal": "e5d0d6155dc29daa"})"
      "\n");
  CHECK(digest_of(found) == 0x9c7993fd6881959);
}

TEST_CASE("the manifest is the same on every rank and for any tiers and schedule") {
  const auto expected = described(odd_model(), options_of(3, 2));
  PlanOptions other = options_of(3, 2);
  other.rank = 1;
  other.placement.state = Tier::host;
  other.schedule.update_in_backward = true;
  CHECK(described(odd_model(), other) == expected);
}

TEST_CASE("manifests distinguish stages only where they differ") {
  const auto stage = [](int number, std::size_t ranks) { return described(odd_model(), options_of(number, ranks)); };
  CHECK(stage(0, 2) != stage(1, 2));
  CHECK(stage(1, 2) == stage(2, 2));
  CHECK(stage(2, 2) != stage(3, 2));
  CHECK(stage(0, 1) == stage(2, 1));
  CHECK(stage(2, 1) != stage(3, 1));
}

TEST_CASE("what a manifest says is read as it was written") {
  PlanOptions options = options_of(3, 4);
  options.placement.parameter_replicas = 2;
  options.format = StateFormat::compact;
  options.names = {"exp_avg", "exp_avg_sq", 2};
  Model model = odd_model();
  model.units[1].tensors[0].name = "a name [3]\nwith lines";
  const SavedCheckpoint found = read(described(model, options));
  const SavedLayout& layout = *found.layout;
  CHECK(layout.placement.shards == 4);
  CHECK(layout.placement.replicas == 1);
  CHECK(layout.placement.parameter_replicas == 2);
  CHECK_FALSE(layout.placement.full_parameters);
  CHECK(found.optimizers.front().optimizer == "AdamW");
  CHECK(found.optimizers.front().moments == moments_of(options.names));
  CHECK(layout.own_values == 2);
  CHECK(RecordedState::of(described(model, options))->format() == StateFormat::compact);
  REQUIRE(layout.units.size() == model.units.size());
  const std::vector<std::size_t> tiles{128, 128, 0, 0, 128, 128};
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    CHECK(layout.units[unit].tile_elements == tiles[unit]);
    REQUIRE(layout.units[unit].tensors.size() == model.units[unit].tensors.size());
    for (std::size_t i = 0; i < model.units[unit].tensors.size(); ++i) {
      const Tensor& written = model.units[unit].tensors[i];
      const std::string& name = layout.units[unit].tensors[i];
      CHECK(name.ends_with(written.name));
      CHECK(found.tensors.at(name).parameter_dtype(name) == model.units[unit].dtype);
      CHECK(found.tensors.at(name).shape == written.shape);
      CHECK((found.tensors.at(name).role == "frozen") == written.frozen);
    }
  }
  CHECK(read(described(model, options_of(0, 3))).layout->placement.replicas == 3);
  CHECK(RecordedState::of(described(model, options))->largest_tile() == 128);
}

TEST_CASE("a manifest with another layout is refused") {
  const SavedCheckpoint run = read(described(odd_model(), options_of(3, 2)));
  const auto check_refused = [&](const std::string& because, const std::function<void(SavedLayout&)>& change) {
    SavedCheckpoint changed = run;
    change(*changed.layout);
    const std::string manifest = run_manifest_of(changed);
    CHECK_THROWS_WITH(read(manifest), Catch::Contains("B3202") && Catch::Contains(because));
    CHECK_FALSE(RecordedState::of(manifest).has_value());
  };
  check_refused("layout.shards is 0", [](SavedLayout& layout) { layout.placement.shards = 0; });
  check_refused("layout.replicas is 0", [](SavedLayout& layout) { layout.placement.replicas = 0; });
  check_refused("layout.shards is 1048577", [](SavedLayout& layout) { layout.placement.shards = (1 << 20) + 1; });
  check_refused("layout.parameter_replicas is 3", [](SavedLayout& layout) { layout.placement.parameter_replicas = 3; });
  check_refused("layout.own_values is 9", [](SavedLayout& layout) { layout.own_values = 9; });
  check_refused("units[0].tensors[0] is \"other\"", [](SavedLayout& layout) { layout.units[0].tensors[0] = "other"; });
  check_refused("units[1].tensors[0] is \"weight\"",
                [](SavedLayout& layout) { layout.units[1].tensors[0] = "weight"; });
  check_refused("layout.units is a list", [](SavedLayout& layout) { layout.units.pop_back(); });
  CHECK_FALSE(RecordedState::of("").has_value());
}

TEST_CASE("a training has to have the parameters and the rule of a run that it takes over") {
  const SavedCheckpoint run = read(described(odd_model(), options_of(3, 2)));
  PlanOptions options = options_of(3, 2);
  const auto obstacle = [&](const Model& model) { return first_obstacle(run, CompiledPlan(model, options)); };
  Model model = odd_model();
  model.units[0].dtype = DType::fp32;
  std::swap(model.units[1], model.units[4]);
  CHECK_FALSE(obstacle(model).has_value());
  options.rule = "Adam";
  CHECK(obstacle(model)->one == "the update rule AdamW");
  options.rule = "AdamW";
  model.units[0].tensors[0].shape = {29, 30};
  CHECK(obstacle(model)->other == "parameter weight [29, 30]");
  model = odd_model();
  model.units[0].tensors[0].name = "another";  // this name comes before all others
  const auto renamed = obstacle(model);
  REQUIRE(renamed.has_value());
  CHECK(renamed->one == "parameter weight [30, 29]");
  CHECK(renamed->other == "parameter another [30, 29]");
  model = odd_model();
  model.units[2].tensors[0].shape = {3, 111};
  CHECK(obstacle(model)->other == "frozen parameter frozen.w [3, 111]");
  model = odd_model();
  model.units[4].tensors.push_back({.name = "more", .shape = {7}});
  CHECK(obstacle(model)->one == "nothing more");
  CHECK(obstacle(model)->other == "parameter more [7]");
  model = odd_model();
  for (Unit& unit : model.units)
    std::erase_if(unit.tensors, [](const Tensor& tensor) { return tensor.frozen; });
  const auto without_frozen = obstacle(model);
  CAPTURE(without_frozen ? without_frozen->one : "", without_frozen ? without_frozen->other : "");
  CHECK_FALSE(without_frozen.has_value());
}

TEST_CASE("digests depend on every byte") {
  CHECK(digest_of("ab") != digest_of("ba"));
  CHECK(digest_of("a") != digest_of("a\n"));
}

TEST_CASE("a manifest is read exactly as it was written, or not at all") {
  const TemporaryDirectory directory;
  const auto path = directory.path() / "state.description";
  const std::string one = described(plain_model(1), options_of(3, 2)),
                    two = described(plain_model(2), options_of(3, 2));
  CHECK(read_run_manifest(path).empty());
  offload::write_text(path, one);
  offload::write_text(path, two);
  CHECK(read_run_manifest(path) == two);
  CHECK(std::distance(std::filesystem::directory_iterator(directory.path()), {}) == 1);
  for (const std::uintmax_t bytes : {std::filesystem::file_size(path) - 1, std::uintmax_t{4}, std::uintmax_t{0}}) {
    std::filesystem::resize_file(path, bytes);
    CHECK(read_run_manifest(path).empty());
  }
  offload::write_text(path, replaced(one, "300", "301"));
  CHECK(read_run_manifest(path).empty());
  CHECK(read_run_manifest("/proc/self/mem").empty());  // its first bytes are an Input/output error
}

TEST_CASE("an unfinished file of a killed writer does not stop the next one") {
  const TemporaryDirectory directory;
  const auto path = directory.path() / "description";
  std::ofstream(path.string() + ".unfinished") << "half";
  const std::string whole = described(plain_model(1), options_of(3, 2));
  offload::write_text(path, whole);
  CHECK(read_run_manifest(path) == whole);
}
