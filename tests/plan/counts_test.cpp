// Tests of how much a step asks of a GPU's driver: launches and events cost microseconds each, whatever they move.
#include <fmt/format.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <iostream>

#include "tests/plan/large_models.h"
#include "tests/plan/plan_rig.h"
#include "tests/plan/spreads.h"
#include "zero/plan/program_cost.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

bool is_in_stream(Lane lane) {
  constexpr std::array on_host{Lane::host, Lane::disk, Lane::fetch};
  return std::ranges::find(on_host, lane) == on_host.end();
}

// What is done in a GPU's streams in one step.
struct Counts {
  std::size_t operations = 0;  // all operations but the uses, which are the trainer's
  std::size_t exchanges = 0;   // groups of NCCL's calls among them
  std::size_t kernels = 0;     // their kernels, without NCCL's
  std::size_t events = 0;      // their events, and those of the uses
  std::size_t updates = 0;     // updates on the GPU and on the host
};

// How a transport and the engine do their part of an operation.
struct Means {
  std::size_t chunk_bytes = std::size_t{64} << 20;  // bytes of each rank in one exchange: NCCL's with eight ranks
  bool gathers_straight = true;                     // a gather needs no kernel
  bool sums_together = true;                        // each chunk has one kernel; otherwise each rank has one
  bool times_all = false;                           // two events an operation, and two for each wait of the trainer
  bool tiles_together = true;                       // neighbours on the host are updated and copied together
};

std::size_t kernels_of(const Op& op, std::size_t ranks, const Means& means) {
  const auto chunks = [&](std::size_t bytes) {
    return ranks == 1 ? 1 : (bytes + means.chunk_bytes - 1) / means.chunk_bytes;  // a rank alone exchanges nothing
  };
  switch (op.kind) {
    case OpKind::gather: return means.gathers_straight ? 0 : ranks * chunks(op.from.bytes);
    case OpKind::reduce: return chunks(op.from.bytes / ranks) * (means.sums_together ? 1 : ranks);
    case OpKind::clear:
    case OpKind::accumulate:
    case OpKind::norm:
    case OpKind::update: return 1;
    default: return 0;
  }
}

std::size_t exchanges_of(const Op& op, std::size_t ranks, const Means& means) {
  const auto chunks = [&](std::size_t bytes) { return (bytes + means.chunk_bytes - 1) / means.chunk_bytes; };
  if (ranks == 1) return 0;
  if (op.kind == OpKind::gather) return means.gathers_straight ? 1 : chunks(op.from.bytes);
  return op.kind == OpKind::reduce ? chunks(op.from.bytes / ranks) : 0;
}

Counts counts_of(const CompiledPlan& plan, const Means& means) {
  Counts counts;
  const std::vector<Op>& ops = plan.program().ops;
  const std::vector<bool> awaited = awaited_in(ops);
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const Op& op = ops[i];
    const std::size_t operations = means.tiles_together ? 1 : op.tiles;
    if (op.kind == OpKind::update) counts.updates += operations;
    if (!is_in_stream(op.lane)) continue;
    const bool is_use = op.kind == OpKind::use;
    if (!is_use) counts.operations += operations;
    counts.exchanges += exchanges_of(op, plan.placement().shards, means);
    counts.kernels += kernels_of(op, plan.placement().shards, means);
    counts.events += means.times_all ? 2 * operations + (is_use ? 2 * op.after.size() : 0) : awaited[i] ? 1 : 0;
  }
  return counts;
}

struct Case {
  std::string name;
  LlamaShape shape;
  std::size_t ranks;
  Spread gradients, state;

  std::size_t units() const { return shape.layers + 3; }
  Counts now() const { return counts(0, {}); }
  // The counts with the tiles, sums and events of version 0.2.
  Counts before() const {
    return counts(std::size_t{256} << 10, {.chunk_bytes = std::size_t{16} << 20,
                                           .gathers_straight = false,
                                           .sums_together = false,
                                           .times_all = true,
                                           .tiles_together = false});
  }

 private:
  Counts counts(std::size_t tile_elements, const Means& means) const {
    PlanSetup setup{.model = llama(shape), .placement = placement_of_stage(3, ranks), .tile_elements = tile_elements};
    setup.placement.gradients = gradients;
    setup.placement.state = state;
    const CompiledPlan plan = plan_of(setup);
    return counts_of(plan, means);
  }
};

const Case small{"8B, 8 ranks, all on the device", llama_8b, 8, device, device};
const Case alone{"3B, 1 rank, all on the device", llama_3b, 1, device, device};
const Case on_host{"70B, 8 ranks, gradients and state on the host", llama_70b, 8, host, host};

}  // namespace

TEST_CASE("a unit takes one update and at most six events where everything is on the device") {
  for (const Case& each : {small, alone}) {
    const Counts now = each.now(), before = each.before();
    CAPTURE(each.name, now.operations, now.kernels, now.events, before.operations, before.kernels, before.events);
    CHECK(now.updates == each.units());
    CHECK(now.events <= 6 * each.units());
    CHECK(now.operations <= 6 * each.units());
    CHECK(now.kernels <= 5 * each.units());
    CHECK(now.exchanges <= 4 * each.units());
    CHECK(20 * now.events < before.events);
    CHECK(20 * now.kernels < before.kernels);
  }
}

TEST_CASE("with state on the host, a unit takes one update and one upload for twelve tiles of 2 Mi elements") {
  const Counts now = on_host.now(), before = on_host.before();
  CAPTURE(now.operations, now.kernels, now.events, now.updates, before.operations, before.kernels, before.events);
  CHECK(now.updates < 5 * on_host.units());
  CHECK(now.operations < 12 * on_host.units());
  CHECK(now.events < 12 * on_host.units());
  CHECK(60 * now.events < before.events);
}

namespace {

// Returns how many operations other lanes hand to the host's lane in a step, and it to others when they are done.
std::size_t hand_overs(const Program& program) {
  std::size_t count = 0;
  std::vector<bool> is_awaited(program.ops.size());
  for (const Op& op : program.ops) {
    if (op.lane == Lane::host) {
      if (!op.after.empty()) ++count;
      continue;
    }
    for (const Wait& wait : op.after) {
      if (program.ops[wait.op].lane == Lane::host) is_awaited[wait.op] = true;
    }
  }
  return count + static_cast<std::size_t>(std::ranges::count(is_awaited, true));
}

}  // namespace

TEST_CASE("the host's lane and others hand over to each other at most 800 times in a step of 8B") {
  struct Tiers {
    Spread parameters, gradients;
  };
  for (const Tiers& at : {Tiers{device, device}, Tiers{device, host}, Tiers{host, device}, Tiers{host, host}}) {
    PlanSetup setup{.model = llama(llama_8b), .placement = placement_of_stage(3, 1), .tile_elements = 0};
    setup.placement.parameters = at.parameters;
    setup.placement.gradients = at.gradients;
    setup.placement.state = host;
    const CompiledPlan plan = plan_of(setup);
    std::size_t tiles = 0;
    for (const Op& op : plan.program().ops) {
      if (op.kind == OpKind::update) tiles += op.tiles;
    }
    CAPTURE(at.parameters.fractions(), at.gradients.fractions());
    CHECK(tiles == 3863);
    CHECK(hand_overs(plan.program()) <= 800);
  }
}

TEST_CASE("sums of gradients are squared on the device before they go to the host, if they are complete there") {
  struct Setting {
    Reduction reduction;
    std::size_t micro_steps;
    bool host_is_device, on_device;
  };
  for (const Setting& each : {Setting{Reduction::each, 1, false, true}, Setting{Reduction::boundary, 3, false, true},
                              Setting{Reduction::each, 3, false, false}, Setting{Reduction::each, 1, true, false}}) {
    PlanSetup setup{.model = plain_model(4),
                    .placement = placement_of_stage(3, 2),
                    .micro_steps = each.micro_steps,
                    .host_is_device = each.host_is_device};
    setup.placement.gradients = setup.placement.state = host;
    setup.placement.reduction = each.reduction;
    const CompiledPlan plan = plan_of(setup);
    const std::vector<Op>& ops = plan.program().ops;
    CAPTURE(each.micro_steps, each.host_is_device);
    CHECK(std::ranges::count_if(ops, takes_norm) == 4);
    for (std::size_t i = 0; i < ops.size(); ++i) {
      if (!takes_norm(ops[i])) continue;
      CHECK((ops[i].lane == Lane::reduce) == each.on_device);
      CHECK((ops[i + 1].kind == OpKind::download && ops[i + 1].from == ops[i].from) == each.on_device);
    }
  }
}

TEST_CASE("a rank alone reads and writes a sum of gradients once for each pass, and makes its squares meanwhile") {
  for (const bool counted : {true, false}) {
    for (const Spread& gradients : {device, host}) {
      for (const std::size_t micro_steps : {1u, 3u}) {
        PlanSetup setup{.model = plain_model(4), .placement = placement_of_stage(2, 1), .micro_steps = micro_steps};
        setup.placement.gradients = gradients;
        setup.placement.state = host;
        setup.model.units[2].tensors.front().counted = counted;
        const CompiledPlan plan = plan_of(setup);
        CAPTURE(counted, gradients.fractions(), micro_steps);
        for (std::size_t unit = 0; unit < 4; ++unit) {
          const UnitLayout& layout = plan.layout().units[unit];
          const std::size_t values = layout.trained.shard * plan.input().width(unit);
          const std::size_t sums = layout.trained.shard * plan.input().width_of_sums(unit);
          std::size_t moved = 0, normed = 0, norms = 0;
          for (const Op& op : plan.program().ops) {
            const bool sums_up = op.kind == OpKind::reduce || op.kind == OpKind::accumulate;
            if (op.unit != unit || !(sums_up || op.kind == OpKind::norm)) continue;
            moved += bytes_moved(op, plan.placement());
            if (op.kind == OpKind::norm) ++norms;
            if (takes_norm(op)) normed += (op.kind == OpKind::norm ? op.from : op.to).bytes;
          }
          const bool is_counted = counted || unit != 2;
          CHECK(normed == sums);
          CHECK((norms > 0) == !is_counted);
          // A later micro-step adds to the sum where it is. Gradients on the host are reduced on the device before.
          const std::size_t later = values + (gradients == host ? 4 : 2) * sums;
          CHECK(moved == values + sums + (micro_steps - 1) * later + (is_counted ? 0 : sums));
        }
      }
    }
  }
}

TEST_CASE("print the counts of a step", "[.counts]") {
  std::cout
      << "| a step of one rank | operations | exchanges | kernels | events | updates |\n|---|---|---|---|---|---|\n";
  for (const Case& each : {small, alone, on_host}) {
    const Counts before = each.before(), now = each.now();
    std::cout << fmt::format("| {} | {} → {} | {} → {} | {} → {} | {} → {} | {} → {} |\n", each.name, before.operations,
                             now.operations, before.exchanges, now.exchanges, before.kernels, now.kernels,
                             before.events, now.events, before.updates, now.updates);
  }
}
