#include "benchmarks/training/run.h"

#include <catch2/catch.hpp>

#include "tests/plan/plan_rig.h"

using namespace ballast;
using namespace ballast::benchmarks;
using namespace ballast::testing;

namespace {

PlanSetup setup_of(Tier parameters, Tier state) {
  PlanSetup setup{.model = plain_model(5), .placement = placement_of_stage(3, 2), .tile_elements = 128};
  setup.placement.parameters = Spread(parameters);
  setup.placement.state = Spread(state);
  setup.schedule.staging_slots = 6;
  return setup;
}

}  // namespace

TEST_CASE("a step reads and writes each record once, and rereads parameters that are only on drives") {
  const CompiledPlan plan = plan_of(setup_of(Tier::device, Tier::nvme));
  const DriveWork work = drive_work_of(plan);
  CHECK(work.record_bytes == plan.blocks().records().record);
  CHECK(work.read_bytes == plan.tiles_on_drive() * work.record_bytes);
  CHECK(work.written_bytes == work.read_bytes);
  CHECK(work.records == 6);

  const CompiledPlan all = plan_of(setup_of(Tier::nvme, Tier::nvme));
  const DriveWork more = drive_work_of(all);
  CHECK(more.written_bytes == work.written_bytes);
  CHECK(more.read_bytes > more.written_bytes);
  CHECK((more.read_bytes - more.written_bytes) % all.blocks().records().first_record == 0);
}

TEST_CASE("with layer_major, the micro-steps of a step read parameters together") {
  PlanSetup setup = setup_of(Tier::nvme, Tier::nvme);
  const DriveWork one = drive_work_of(plan_of(setup));
  setup.micro_steps = 8;
  const DriveWork by_micro_steps = drive_work_of(plan_of(setup));
  setup.schedule.layer_major = true;
  const DriveWork by_layers = drive_work_of(plan_of(setup));
  CHECK(by_layers.written_bytes == one.written_bytes);
  CHECK(by_layers.read_bytes == one.read_bytes);
  CHECK(by_micro_steps.read_bytes - one.written_bytes > 6 * (one.read_bytes - one.written_bytes));
}

TEST_CASE("without state on drives, a step reads and writes nothing there") {
  const DriveWork work = drive_work_of(plan_of(setup_of(Tier::device, Tier::host)));
  CHECK(work.read_bytes + work.written_bytes + work.record_bytes + work.records == 0);
}
