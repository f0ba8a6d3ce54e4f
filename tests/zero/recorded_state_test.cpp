#include "zero/runs/recorded_state.h"

#include <catch2/catch.hpp>
#include <set>
#include <tuple>

#include "tests/plan/plan_rig.h"
#include "zero/plan/names_in_files.h"

using namespace ballast;
using namespace ballast::testing;

// The program of each rank says which stretch of a unit each of its records holds.
TEST_CASE("each element of each trained tensor is where the ranks that wrote the records have it") {
  const Model model = odd_model(3);
  for (const auto& [stage, ranks, replicas] :
       {std::tuple(3, 4u, 1u), std::tuple(2, 3u, 1u), std::tuple(0, 2u, 1u), std::tuple(3, 4u, 2u)}) {
    CAPTURE(stage, ranks, replicas);
    PlanOptions options{.placement = placement_of_stage(stage, ranks), .tile_elements = 256, .rule = "AdamW"};
    options.placement.parameter_replicas = replicas;
    options.placement.state = Tier::nvme;
    options.names = {"exp_avg", "exp_avg_sq"};
    options.full_records = true;
    const CompiledPlan first(model, options);
    const auto state = RecordedState::of(describe(first));
    REQUIRE(state.has_value());
    const offload::RecordShape shape = state->shape();
    const offload::RecordShape planned = first.blocks().shape(first.tiles_on_drive());
    CHECK(std::tie(shape.tiles, shape.payload_bytes, shape.first_bytes) ==
          std::tie(planned.tiles, planned.payload_bytes, planned.first_bytes));
    const auto names = names_in_runs(model);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      options.rank = rank;
      const CompiledPlan plan(model, options);
      const std::size_t shard = shard_of(options.placement, rank);
      for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
        for (std::size_t i = 0; i < model.units[unit].tensors.size(); ++i) {
          const Tensor& tensor = model.units[unit].tensors[i];
          if (tensor.frozen) continue;
          std::size_t elements = 0;
          for (const RecordedState::Part& part : state->parts_of(names[unit][i], {0, tensor.elements()})) {
            CHECK(part.range.first == elements);
            elements += part.range.count;
            if (part.shard != shard) continue;
            const auto [of_unit, tile] = plan.tile_of(part.record);
            CHECK(of_unit == unit);
            const auto home = std::ranges::find_if(plan.program().homes, [&, tile = tile](const Home& each) {
              return each.on_drive && each.unit == unit && each.tile == tile;
            });
            REQUIRE(home != plan.program().homes.end());
            CHECK(home->range.first + part.in_tile == plan.layout().units[unit].tensor_begin[i] + part.range.first);
            CHECK(part.in_tile + part.range.count <= home->range.count);
          }
          CHECK(elements == tensor.elements());
        }
      }
    }
  }
}

TEST_CASE("a range of a tensor is found in the records that have it") {
  PlanOptions options{.placement = placement_of_stage(3, 2), .tile_elements = 128, .rule = "AdamW"};
  const auto state = RecordedState::of(describe(CompiledPlan(plain_model(2), options)));
  REQUIRE(state.has_value());
  CHECK(state->trained() == std::vector<std::string>{"h.0.weight", "h.1.weight"});
  const auto parts = state->parts_of("h.1.weight", {100, 100});  // shards of 256 elements, in tiles of 128
  REQUIRE(parts.size() == 2);
  CHECK(std::tie(parts[0].shard, parts[0].record, parts[0].in_tile) == std::tuple(0u, 2u, 100u));
  CHECK(parts[0].range == Range{100, 28});
  CHECK(std::tie(parts[1].shard, parts[1].record, parts[1].in_tile) == std::tuple(0u, 3u, 0u));
  CHECK(parts[1].range == Range{128, 72});
}

// Readers of checkpoints find state in a record as in a chunk.
TEST_CASE("a record is laid out as a chunk of a whole tile") {
  for (const StateFormat format : all_state_formats) {
    PlanOptions options{.placement = placement_of_stage(3, 2), .tile_elements = 128, .rule = "AdamW"};
    options.format = format;
    options.names = {"exp_avg", "exp_avg_sq"};
    options.names.own_values = 2;
    options.full_records = true;
    const CompiledPlan plan(plain_model(2), options);
    const auto state = RecordedState::of(describe(plan));
    REQUIRE(state.has_value());
    std::vector<std::byte> payload(state->shape().payload_bytes);
    const TileMemory recorded = plan.blocks().recorded(1, 0, 128, payload.data());
    const TileMemory chunk =
        state->saved().tensors.at("h.1.weight").kind->tile(payload.data(), state->record_elements(1));
    CHECK(std::tie(chunk.format, chunk.parameter_dtype, chunk.parameter, chunk.master, chunk.momentum,
                   chunk.variance) == std::tie(recorded.format, recorded.parameter_dtype, recorded.parameter,
                                               recorded.master, recorded.momentum, recorded.variance));
    CHECK(chunk.momentum_scales == recorded.momentum_scales);
    CHECK(chunk.variance_scales == recorded.variance_scales);
    CHECK(chunk.own.array(1) == recorded.own.array(1));
    CHECK(chunk.own.count == 2);
  }
}

TEST_CASE("a manifest whose units are not cut or kept as it says is not used") {
  PlanOptions options{.placement = placement_of_stage(3, 2), .tile_elements = 128, .rule = "AdamW"};
  SavedCheckpoint run = parse_run_manifest(describe(CompiledPlan(plain_model(2), options)), "here");
  CHECK(RecordedState::of(run_manifest_of(run)).has_value());
  std::size_t& tile = run.layout->units.back().tile_elements;
  for (const std::size_t other : {256u, 100u}) {
    tile = other;
    CHECK_FALSE(RecordedState::of(run_manifest_of(run)).has_value());
  }
  tile = 128;
  run.tensors.at("h.1.weight").kind->format = StateFormat::compact;
  CHECK_FALSE(RecordedState::of(run_manifest_of(run)).has_value());
}
