// Tests of units of which neighbouring ranks have other parts, such as experts.
#include <ballast/error.h>

#include <catch2/catch.hpp>

#include "tests/plan/plan_rig.h"
#include "tests/plan/verify.h"
#include "zero/plan/collective_memory.h"
#include "zero/plan/layout.h"
#include "zero/plan/names_in_files.h"
#include "zero/plan/program_cost.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Matchers::Contains;

namespace {

PlanSetup setup_with_parts(int stage, std::size_t ranks, std::size_t parts, Tier tier = Tier::device) {
  PlanSetup setup;
  setup.model = odd_model();
  setup.model.units[1].parts = setup.model.units[2].parts = parts;  // one has frozen tensors, one is all frozen
  setup.placement = placement_of_stage(stage, ranks);
  setup.placement.state = Spread(tier);
  if (stage == 3) setup.placement.parameters = Spread(tier);
  return setup;
}

}  // namespace

TEST_CASE("ranks with the same part of a unit share it, and all tiers and stages have correct programs for it") {
  for (const auto& [ranks, parts] : {std::pair{2u, 2u}, {4u, 2u}, {6u, 3u}}) {
    for (const int stage : {1, 2, 3}) {
      for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
        for (std::size_t rank = 0; rank < ranks; ++rank) {
          PlanSetup setup = setup_with_parts(stage, ranks, parts, tier);
          setup.rank = rank;
          const CompiledPlan plan = plan_of(setup);
          CAPTURE(ranks, parts, stage, name(tier), rank);
          CHECK(verify(plan.input(), plan.program()) == std::vector<std::string>{});
          const Section& section = plan.layout().units[1].trained;
          CHECK(section.shards == ranks / parts);
          CHECK(section.shard_range(rank).first == rank / parts * section.shard);
          for (const Op& op : plan.program().ops) {
            if (op.kind == OpKind::gather || op.kind == OpKind::reduce)
              CHECK(op.parts == plan.model().units[op.unit].parts);
            if (op.kind == OpKind::gather) CHECK(op.to.bytes == op.from.bytes * (ranks / op.parts));
          }
        }
      }
    }
  }
}

TEST_CASE("what a rank exchanges of a part takes the bytes and the memory of its group") {
  PlanSetup setup = setup_with_parts(3, 8, 4);
  setup.wire.reduce = WireFormat::int8;
  const CompiledPlan plan = plan_of(setup);
  const auto reduce =
      std::ranges::find_if(plan.program().ops, [](const Op& op) { return op.kind == OpKind::reduce && op.parts > 1; });
  REQUIRE(reduce != plan.program().ops.end());
  const UnitLayout& layout = plan.layout().units[1];
  CHECK(reduce->codes.received == kernels::quantized_bytes(layout.trained.shard, kernels::CodeBits::eight));
  Machine machine;
  machine.ranks_per_host = 4;
  machine.gather = machine.reduce = machine.across = 1;
  const LinkSeconds seconds = seconds_on_links(*reduce, plan.placement(), machine);
  CHECK(seconds.inside == 0);  // its group has one rank on each host
  CHECK(seconds.across == static_cast<double>(reduce->codes.received));
  CHECK(reducing_ranks(plan.placement(), 5, 4, Ranks::shard_group).per_host == 4);
  CHECK(reducing_ranks(plan.placement(), 5, 4, Ranks::shard_group, 4).per_host == 1);
  CHECK(reducing_ranks(placement_of_stage(3, 16), 5, 8, Ranks::shard_group, 4).per_host == 2);
}

TEST_CASE("parts that ranks cannot share are refused") {
  CHECK_THROWS_WITH(plan_of(setup_with_parts(0, 4, 2)), Contains("2 parts of a unit among 1 ranks"));
  CHECK_THROWS_WITH(plan_of(setup_with_parts(3, 4, 3)), Contains("3 parts of a unit among 4 ranks") && Contains("h.0"));
  PlanSetup setup = setup_with_parts(3, 4, 2);
  setup.model.units[2].parts = 4;
  CHECK_THROWS_WITH(plan_of(setup), Contains("one number of parts"));
  setup = setup_with_parts(3, 4, 2);
  setup.placement.parameter_replicas = 2;
  CHECK_THROWS_WITH(plan_of(setup), Contains("copies of the state or of the parameters"));
  setup = setup_with_parts(2, 4, 2);
  setup.placement.replicas = 2;
  CHECK_THROWS_WITH(plan_of(setup), Contains("copies of the state or of the parameters"));
  setup = setup_with_parts(3, 4, 2, Tier::nvme);
  setup.full_records = true;
  CHECK_THROWS_WITH(plan_of(setup), Contains("the records of a run"));
  setup = setup_with_parts(3, 4, 2);
  setup.model = matrix_model();
  setup.model.units[0].parts = 2;
  setup.orthogonalization_steps = 5;
  CHECK_THROWS_WITH(plan_of(setup), Contains("a rule of whole matrices"));
}

TEST_CASE("tensors of units with several parts have no names in files") {
  CHECK_THROWS_WITH(names_of_whole_units(setup_with_parts(3, 4, 2).model), Contains("B1005") && Contains("unit h."));
  CHECK(names_of_whole_units(plain_model(2)).size() == 2);
}
