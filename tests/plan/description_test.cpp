#include "zero/plan/description.h"

#include <catch2/catch.hpp>

#include "tests/plan/plan_rig.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

std::vector<std::string> described(const Model& model, const PlanOptions& options) {
  return describe(CompiledPlan(model, options));
}

PlanOptions options_of(int stage, std::size_t ranks) {
  return {.placement = placement_of_stage(stage, ranks), .tile_elements = 128, .rule = "AdamW"};
}

}  // namespace

// Files contain these lines. If they change, older runs are refused as another training's.
TEST_CASE("a description has one fact about a training's state per line") {
  CHECK(described(odd_model(), options_of(3, 2)) == std::vector<std::string>{
                                                        "2 ranks",
                                                        "stage 3",
                                                        "1 copy of the state",
                                                        "the update rule AdamW",
                                                        "parameter 1 weight [30, 29] bf16",
                                                        "state format split of unit 1 embedding",
                                                        "tiles of 128 elements of unit 1 embedding",
                                                        "parameter 2 w [700] bf16",
                                                        "frozen parameter 3 frozen [450] bf16",
                                                        "parameter 4 b [3] bf16",
                                                        "state format split of unit 2 h.0",
                                                        "tiles of 128 elements of unit 2 h.0",
                                                        "frozen parameter 5 w [333] bf16",
                                                        "state format split of unit 3 frozen",
                                                        "tiles of 0 elements of unit 3 frozen",
                                                        "parameter 6 w [0] bf16",
                                                        "state format split of unit 4 nothing",
                                                        "tiles of 0 elements of unit 4 nothing",
                                                        "parameter 7 w [5] fp32",
                                                        "state format fp32 of unit 5 norm",
                                                        "tiles of 128 elements of unit 5 norm",
                                                        "parameter 8 b [29] bf16",
                                                        "parameter weight tied to weight of unit embedding",
                                                        "state format split of unit 6 head",
                                                        "tiles of 128 elements of unit 6 head",
                                                    });
  CHECK(digest_of(described(plain_model(1), options_of(3, 2))) == 0xd9c178dd9d74e64);
}

TEST_CASE("the description is the same on every rank and for any tiers and schedule") {
  const auto expected = described(odd_model(), options_of(3, 2));
  PlanOptions other = options_of(3, 2);
  other.rank = 1;
  other.placement.state = Tier::host;
  other.schedule.update_in_backward = true;
  CHECK(described(odd_model(), other) == expected);
}

TEST_CASE("descriptions distinguish stages only where they differ") {
  const auto stage = [](int number, std::size_t ranks) { return described(odd_model(), options_of(number, ranks))[1]; };
  CHECK(stage(0, 2) == "stage 0");
  CHECK(stage(1, 2) == "stage 1 or 2");
  CHECK(stage(2, 2) == "stage 1 or 2");
  CHECK(stage(0, 1) == "a stage below 3");
  CHECK(stage(2, 1) == "a stage below 3");
  CHECK(stage(3, 1) == "stage 3");
}

TEST_CASE("what a description says is read as it was written") {
  PlanOptions options = options_of(3, 4);
  options.placement.parameter_replicas = 2;
  options.format = StateFormat::compact;
  Model model = odd_model();
  model.units[1].tensors[0].name = "a name [3] with words";
  const auto found = read_description(described(model, options));
  REQUIRE(found.has_value());
  CHECK(found->placement.shards == 4);
  CHECK(found->placement.replicas == 1);
  CHECK(found->placement.parameter_replicas == 2);
  CHECK_FALSE(found->placement.full_parameters);
  CHECK(found->rule == "AdamW");
  CHECK(found->format == StateFormat::compact);
  CHECK(found->tile_elements == std::vector<std::size_t>{128, 128, 0, 0, 128, 128});
  REQUIRE(found->model.units.size() == model.units.size());
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    CHECK(found->model.units[unit].name == model.units[unit].name);
    CHECK(found->model.units[unit].dtype == model.units[unit].dtype);
    REQUIRE(found->model.units[unit].tensors.size() == model.units[unit].tensors.size());
    for (std::size_t i = 0; i < model.units[unit].tensors.size(); ++i) {
      const Tensor& read = found->model.units[unit].tensors[i];
      const Tensor& written = model.units[unit].tensors[i];
      CHECK(read.name == written.name);
      CHECK(read.shape == written.shape);
      CHECK(read.frozen == written.frozen);
    }
  }
  CHECK(read_description(described(model, options_of(0, 3)))->placement.replicas == 3);
}

TEST_CASE("lines that no description has are not read as one") {
  const std::vector<std::string> lines = described(odd_model(), options_of(3, 2));
  for (std::size_t line = 0; line < lines.size(); ++line) {
    if (lines[line].starts_with("parameter weight tied")) continue;
    CAPTURE(lines[line]);
    std::vector<std::string> changed = lines;
    changed[line] = "0 " + changed[line];
    const auto found = read_description(changed);
    const bool is_stage = line == 1;  // every stage below 3 has its own words
    CHECK((is_stage || !found.has_value()));
  }
  CHECK_FALSE(read_description({}).has_value());
  CHECK_FALSE(read_description(std::span(lines).first(lines.size() - 1)).has_value());
}

TEST_CASE("a training has to have the parameters and the rule of a run that it takes over") {
  const auto run = read_description(described(odd_model(), options_of(3, 2)));
  REQUIRE(run.has_value());
  Model model = odd_model();
  std::swap(model.units[1], model.units[4]);
  model.units[0].dtype = DType::fp32;
  CHECK_FALSE(first_obstacle(*run, model, "AdamW").has_value());
  CHECK(first_obstacle(*run, model, "Adam")->one == "the update rule AdamW");
  model.units[0].tensors[0].shape = {29, 30};
  CHECK(first_obstacle(*run, model, "AdamW")->other == "parameter weight [29, 30]");
  model = odd_model();
  model.units[0].tensors[0].name = "another";  // this name comes before all others
  const auto renamed = first_obstacle(*run, model, "AdamW");
  REQUIRE(renamed.has_value());
  CHECK(renamed->one == "parameter weight [30, 29]");
  CHECK(renamed->other == "parameter another [30, 29]");
  model = odd_model();
  model.units[2].tensors[0].shape = {3, 111};
  CHECK(first_obstacle(*run, model, "AdamW")->other == "frozen parameter frozen.w [3, 111]");
  for (Unit& unit : model.units)
    std::erase_if(unit.tensors, [](const Tensor& tensor) { return tensor.frozen; });
  const auto without_frozen = first_obstacle(*run, model, "AdamW");
  CAPTURE(without_frozen ? without_frozen->one : "", without_frozen ? without_frozen->other : "");
  CHECK_FALSE(without_frozen.has_value());
}

TEST_CASE("the first difference names the first line of each side that the other lacks") {
  using Lines = std::vector<std::string>;
  CHECK_FALSE(first_difference(Lines{"a", "b"}, Lines{"a", "b"}).has_value());
  const auto changed = first_difference(Lines{"a", "b", "c"}, Lines{"a", "x", "y"});
  REQUIRE(changed.has_value());
  CHECK(changed->one == "b");
  CHECK(changed->other == "x");
  const auto longer = first_difference(Lines{"a"}, Lines{"a", "b"});
  REQUIRE(longer.has_value());
  CHECK(longer->one == "nothing more");
  CHECK(longer->other == "b");
}

TEST_CASE("digests depend on every line and on the order, and a name cannot span two lines") {
  using Lines = std::vector<std::string>;
  CHECK(digest_of(Lines{"a", "b"}) != digest_of(Lines{"b", "a"}));
  CHECK(digest_of(Lines{"a", "b"}) != digest_of(Lines{"ab"}));
  CHECK(digest_of(Lines{"a"}) != digest_of(Lines{"a", ""}));
  const Model model{{{.name = "h", .tensors = {{"w\nstage 3", {4}}}}}};
  CHECK(described(model, options_of(3, 1))[4] == "parameter 1 w?stage 3 [4] bf16");
}
