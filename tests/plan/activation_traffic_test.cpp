// Tests of the simulated traffic of activations that leave the device until backward.
#include "zero/plan/simulate.h"

#include <catch2/catch.hpp>

#include "tests/plan/plan_rig.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

const Machine machine_of_traffic{.gather = 100e9,
                                 .reduce = 100e9,
                                 .upload = 50e9,
                                 .download = 50e9,
                                 .read = 10e9,
                                 .write = 5e9,
                                 .device_memory = 2e12,
                                 .host_memory = 100e9};

template <class Name>
constexpr std::size_t of(Name name) {
  return static_cast<std::size_t>(name);
}

}  // namespace

TEST_CASE("activations that are offloaded take time on the lanes, and only what the compute does not hide is exposed") {
  const PlanSetup setup{.model = plain_model(4, 1'000'000), .placement = placement_of_stage(0, 1)};
  const CompiledPlan plan = plan_of(setup);
  const std::vector<UnitWork> work(4, UnitWork{0.1, 0.2, 2'000'000'000});
  const auto simulated = [&](Tier tier) {
    return simulate({with_activations(plan.program(), work, tier), setup.placement, machine_of_traffic, work});
  };
  const Simulation kept = simulated(Tier::device);
  const Simulation host = simulated(Tier::host);
  CHECK(host.bytes[of(Lane::download)] == 4 * work[0].offloaded_bytes + kept.bytes[of(Lane::download)]);
  CHECK(host.bytes[of(Lane::upload)] == 4 * work[0].offloaded_bytes + kept.bytes[of(Lane::upload)]);
  CHECK(host.busy[of(Lane::upload)] == Approx(4 * 0.04));
  CHECK(kept.bytes[of(Lane::disk)] == 0);
  // The first backward use waits for its activations to leave and to return. All other copies are hidden.
  CHECK(host.seconds == Approx(kept.seconds + 0.04 + 0.04).epsilon(1e-2));
  const Simulation drive = simulated(Tier::nvme);
  CHECK(drive.bytes[of(Lane::disk)] == 8 * work[0].offloaded_bytes);
  // A write takes 0.4 s and its read 0.2 s: the drive is busy from the first write to the last read.
  CHECK(drive.busy[of(Lane::disk)] == Approx(4 * 0.6));
  CHECK(drive.seconds >= 0.1 + 0.04 + 4 * 0.6);
  CHECK(drive.exposed[of(Phase::forward)] > 0);
  CHECK(drive.exposed[of(Phase::backward)] > 0.2);
}

TEST_CASE("operations keep their waits where the traffic of activations is added to a program") {
  const PlanSetup setup{.model = plain_model(3, 300), .placement = placement_of_stage(3, 2)};
  const CompiledPlan plan = plan_of(setup);
  const std::vector<UnitWork> work(3, UnitWork{0.1, 0.2, 1000});
  const Program with = with_activations(plan.program(), work, Tier::nvme);
  const auto waits = [](const Program& program) {
    std::vector<std::string> all;
    for (const Op& op : program.ops) {
      if (op.from.slot == none && op.to.slot == none && op.kind != OpKind::commit && op.kind != OpKind::agree) continue;
      std::string text = label(op, plain_model(3, 300));
      for (const Wait& wait : op.after) {
        const Op& other = program.ops[wait.op];
        const bool is_added = other.unit != none && other.from.slot == none && other.to.slot == none;
        if (!is_added) text += " after " + label(other, plain_model(3, 300)) + (wait.is_last_steps ? " before" : "");
      }
      all.push_back(text);
    }
    return all;
  };
  CHECK(with.ops.size() == plan.program().ops.size() + 4 * 3);
  CHECK(waits(with) == waits(plan.program()));
}
