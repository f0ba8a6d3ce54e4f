#include <catch2/catch.hpp>

#include "tests/plan/plan_rig.h"
#include "zero/plan/program_cost.h"
#include "zero/plan/simulate.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

const Machine two_hosts_of_8{.ranks_per_host = 8, .gather = 400e9, .reduce = 200e9, .across = 50e9};

constexpr std::size_t units = 5;

PlanSetup on_16_ranks(std::size_t parameter_replicas) {
  PlanSetup setup{.model = plain_model(units, 1'000'000), .placement = placement_of_stage(3, 16)};
  setup.placement.parameter_replicas = parameter_replicas;
  return setup;
}

std::vector<Op> all_of(OpKind kind, const CompiledPlan& plan) {
  std::vector<Op> found;
  std::ranges::copy_if(plan.program().ops, std::back_inserter(found), [&](const Op& op) { return op.kind == kind; });
  return found;
}

double seconds_across(const CompiledPlan& plan, OpKind kind) {
  double seconds = 0;
  for (const Op& op : all_of(kind, plan))
    seconds += seconds_on_links(op, plan.placement(), two_hosts_of_8).across;
  return seconds;
}

}  // namespace

TEST_CASE("each byte comes to a host through one of its links, and is passed on inside") {
  const PlanSetup setup = on_16_ranks(1);
  const CompiledPlan plan = plan_of(setup);
  for (const Op& gather : all_of(OpKind::gather, plan)) {
    const auto all = static_cast<double>(gather.to.bytes);
    CHECK(seconds_on_links(gather, plan.placement(), two_hosts_of_8).sum() ==
          Approx(all * 7 / 8 / 400e9 + all / 8 / 2 / 50e9));
  }
  for (const Op& reduce : all_of(OpKind::reduce, plan)) {
    const auto all = static_cast<double>(reduce.from.bytes);
    CHECK(seconds_on_links(reduce, plan.placement(), two_hosts_of_8).sum() ==
          Approx(all * 7 / 8 / 200e9 + 2 * all / 8 / 2 / 50e9));  // sums of bf16 values are in fp32
  }
  Machine one_host = two_hosts_of_8;
  one_host.ranks_per_host = 0;
  const Op gather = all_of(OpKind::gather, plan)[0];
  CHECK(seconds_on_links(gather, plan.placement(), one_host).sum() ==
        Approx(static_cast<double>(gather.to.bytes) * 15 / 16 / 400e9));
}

TEST_CASE("a copy of the parameters in each host crosses the links once a step, and gradients as before") {
  const PlanSetup shared = on_16_ranks(1), copies = on_16_ranks(2);
  const CompiledPlan of_shared = plan_of(shared), of_copies = plan_of(copies);
  const std::size_t gathers = all_of(OpKind::gather, of_shared).size();
  CHECK(gathers > units);
  CHECK(seconds_across(of_shared, OpKind::gather) / static_cast<double>(gathers) ==
        Approx(seconds_across(of_copies, OpKind::gather) / units));
  CHECK(seconds_across(of_copies, OpKind::reduce) == Approx(seconds_across(of_shared, OpKind::reduce)));
}

TEST_CASE("codes of sums that are half as large take half of the time between hosts") {
  PlanSetup setup = on_16_ranks(1);
  setup.wire = {.reduce = WireFormat::int8};
  const double int8 = seconds_across(plan_of(setup), OpKind::reduce);
  setup.wire.across = WireFormat::int4;
  CHECK(seconds_across(plan_of(setup), OpKind::reduce) == Approx(int8 / 2));
}

TEST_CASE("gathers and reductions take turns on the same links, but not inside of hosts and between them") {
  Machine machine = two_hosts_of_8;
  machine.upload = machine.download = machine.read = machine.write = machine.device_memory = machine.host_memory = 1e15;
  machine.collective_latency = 0;
  const std::vector<UnitWork> no_work(units);
  const auto seconds_of_step = [&](const CompiledPlan& plan) {
    return simulate({plan.program(), plan.placement(), machine, no_work}).seconds;
  };
  const CompiledPlan of_shared = plan_of(on_16_ranks(1)), of_copies = plan_of(on_16_ranks(2));
  machine.gather = machine.reduce = 1e15;
  CHECK(seconds_of_step(of_shared) ==
        Approx(seconds_across(of_shared, OpKind::gather) + seconds_across(of_shared, OpKind::reduce)).epsilon(0.01));
  machine.gather = 1e9;  // if there are copies, only the reductions and one gather of a unit pass between hosts
  const double across = seconds_across(of_copies, OpKind::gather) + seconds_across(of_copies, OpKind::reduce);
  double inside = 0;
  for (const Op& op : all_of(OpKind::gather, of_copies))
    inside += seconds_on_links(op, of_copies.placement(), machine).inside;
  CHECK(seconds_of_step(of_copies) >= inside);
  CHECK(seconds_of_step(of_copies) < inside + across * 0.9);
}
