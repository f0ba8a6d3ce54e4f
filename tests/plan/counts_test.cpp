// Tests of how much a step asks of a GPU's driver: launches and events cost microseconds each, whatever they move.
#include <algorithm>
#include <catch2/catch.hpp>

#include "tests/plan/large_models.h"
#include "tests/plan/plan_rig.h"
#include "tests/plan/spreads.h"
#include "zero/plan/awaited.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

bool is_in_stream(Lane lane) {
  constexpr std::array on_host{Lane::host, Lane::disk, Lane::fetch};
  return std::ranges::find(on_host, lane) == on_host.end();
}

// Operations of a program, without the uses, which are the trainer's.
struct Counts {
  std::size_t in_streams = 0;
  std::size_t updates = 0;
  std::size_t events = 0;  // uses mark their ends too
};

Counts counts_of(const Program& program) {
  Counts counts;
  const std::vector<bool> awaited = awaited_in(program.ops);
  for (std::size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    if (op.kind == OpKind::update) ++counts.updates;
    if (!is_in_stream(op.lane)) continue;
    if (op.kind != OpKind::use) ++counts.in_streams;
    if (awaited[i]) ++counts.events;
  }
  return counts;
}

Counts counts_of(const LlamaShape& shape, std::size_t ranks, const Spread& state) {
  PlanSetup setup{.model = llama(shape), .placement = placement_of_stage(3, ranks), .tile_elements = 0};
  setup.placement.state = state;
  const CompiledPlan plan = plan_of(setup);
  return counts_of(plan.program());
}

}  // namespace

TEST_CASE("a unit takes one update and at most six events where everything is on the device") {
  for (const auto& [shape, ranks] : {std::pair{llama_8b, 8u}, std::pair{llama_3b, 1u}}) {
    const std::size_t units = shape.layers + 3;
    const Counts counts = counts_of(shape, ranks, device);
    CAPTURE(ranks, counts.in_streams, counts.updates, counts.events);
    CHECK(counts.updates == units);
    CHECK(counts.events <= 6 * units);
    CHECK(counts.in_streams <= 8 * units);
  }
}

TEST_CASE("sums of gradients are squared on the device before they go to the host, if they are complete there") {
  struct Case {
    Reduction reduction;
    std::size_t micro_steps;
    bool host_is_device, on_device;
  };
  for (const Case& each : {Case{Reduction::each, 1, false, true}, Case{Reduction::boundary, 3, false, true},
                           Case{Reduction::each, 3, false, false}, Case{Reduction::each, 1, true, false}}) {
    PlanSetup setup{.model = plain_model(4),
                    .placement = placement_of_stage(3, 2),
                    .micro_steps = each.micro_steps,
                    .host_is_device = each.host_is_device};
    setup.placement.gradients = setup.placement.state = host;
    setup.placement.reduction = each.reduction;
    const CompiledPlan plan = plan_of(setup);
    const std::vector<Op>& ops = plan.program().ops;
    CAPTURE(each.micro_steps, each.host_is_device);
    CHECK(std::ranges::count(ops, OpKind::norm, &Op::kind) == 4);
    for (std::size_t i = 0; i < ops.size(); ++i) {
      if (ops[i].kind != OpKind::norm) continue;
      CHECK((ops[i].lane == Lane::reduce) == each.on_device);
      CHECK((ops[i + 1].kind == OpKind::download && ops[i + 1].from == ops[i].from) == each.on_device);
    }
  }
}

TEST_CASE("with state on the host, a unit takes one update and one event for each tile of 2 Mi elements") {
  const std::size_t units = llama_70b.layers + 3;
  const Counts counts = counts_of(llama_70b, 8, host);
  CAPTURE(counts.in_streams, counts.updates, counts.events);
  CHECK(counts.updates < 53 * units);
  CHECK(counts.events <= 3 * counts.updates);
}
