#include <ballast/planner.h>

#include "zero/plan/program_cost.h"
#include "zero/plan/simulate.h"

#include <catch2/catch.hpp>

#include "tests/plan/large_models.h"
#include "tests/plan/plan_rig.h"
#include "tests/sanitizer.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

constexpr std::size_t gib = std::size_t{1} << 30;

Machine fast_machine() {
  return {.bytes = {80 * gib, 1000 * gib, 8000 * gib},
          .gather = 100e9,
          .reduce = 100e9,
          .upload = 50e9,
          .download = 50e9,
          .read = 10e9,
          .write = 5e9,
          .device_memory = 2e12,
          .host_memory = 100e9};
}

Simulation simulation_of(const PlanSetup& setup, const Machine& machine, const UnitWork& work,
                         bool waits_for_updates = false) {
  const CompiledPlan plan = plan_of(setup);
  const std::vector<UnitWork> all(setup.model.units.size(), work);
  return simulate({plan.program(), setup.placement, machine, all, waits_for_updates});
}

ChoiceInput asking(const Model& model, const std::vector<UnitWork>& work, std::size_t ranks) {
  return {.model = model,
          .machine = fast_machine(),
          .work = work,
          .ranks = ranks,
          .names = optim::AdamW::state,
          .tile_elements = std::size_t{1} << 20};
}

constexpr std::size_t at(Lane lane) { return static_cast<std::size_t>(lane); }
constexpr std::size_t at(Phase phase) { return static_cast<std::size_t>(phase); }

}  // namespace

TEST_CASE("updates take the time of memory or of arithmetic, whichever is longer") {
  const Model model = plain_model(4, 1'000'000);
  ChoiceInput question = asking(model, std::vector<UnitWork>(4), 1);
  const auto updating = [&](Tier tier, Lane lane) {
    Placement placement = placement_of_stage(0, 1);
    if (tier == Tier::host) placement.state = {0.0, 1.0, 0.0};
    return price(question, placement).simulation.busy[at(lane)];
  };
  const double on_device = updating(Tier::device, Lane::update);
  const double on_host = updating(Tier::host, Lane::host);
  question.machine.device_updates = question.machine.device_memory / 2;
  question.machine.host_updates = 2 * question.machine.host_memory;
  CHECK(updating(Tier::device, Lane::update) == Approx(2 * on_device));
  CHECK(updating(Tier::host, Lane::host) == Approx(on_host));
}

TEST_CASE("a question may say that no step begins before the updates of the last one") {
  ChoiceInput question = asking(plain_model(4, 1'000'000), std::vector<UnitWork>(4, {1e-3, 2e-3}), 1);
  const Placement placement = placement_of_stage(0, 1);
  const double overlapped = price(question, placement).simulation.seconds;
  question.waits_for_updates = true;
  CHECK(price(question, placement).simulation.seconds > overlapped);
}

TEST_CASE("a step of many micro-steps is priced by those of fewer") {
  const auto check = [](const Placement& placement, bool layer_major) {
    ChoiceInput question = asking(plain_model(6, 1'000'000), std::vector<UnitWork>(6, {1e-4, 2e-4}), 1);
    question.tile_elements = 1024 * 100;
    question.schedule.layer_major = layer_major;
    question.micro_steps = 48;  // the most that are priced as they are
    const Simulation before = price(question, placement).simulation;
    question.micro_steps = 49;
    const Choice many = price(question, placement);
    const CutModel cut(question.model, options_of(question, placement, 0));
    const Program program = compile(cut.input);
    const Simulation whole = simulate({program, placement, question.machine, question.work, false});
    CHECK(many.simulation.seconds == Approx(whole.seconds).epsilon(1e-9));
    CHECK(many.simulation.seconds > before.seconds);
    CHECK(many.simulation.bytes == whole.bytes);
    for (std::size_t lane = 0; lane < lane_count; ++lane)
      CHECK(many.simulation.busy[lane] == Approx(whole.busy[lane]).epsilon(1e-9));
    CHECK(many.ledger == ledger_of(program, cut.blocks.records()));
  };
  for (const Tier gradients : {Tier::device, Tier::host}) {
    for (const Tier far : {gradients, Tier::nvme}) {
      for (const bool layer_major : {false, true}) {
        CAPTURE(name(gradients), name(far), layer_major);
        Placement placement = placement_of_stage(3, 1);
        placement.gradients = gradients;
        placement.parameters = placement.state = far;
        check(placement, layer_major);
      }
    }
  }
}

TEST_CASE("with everything resident, a step takes the time of its compute and updates") {
  Machine machine = fast_machine();
  machine.collective_latency = 0;
  PlanSetup setup{.model = plain_model(4, 1'000'000), .placement = placement_of_stage(0, 1)};
  const Simulation step = simulation_of(setup, machine, {0.1, 0.2});
  CHECK(step.seconds == Approx(4 * 0.3).epsilon(1e-3));
  CHECK(step.busy[at(Lane::compute)] == Approx(1.2));
  CHECK(step.bytes[at(Lane::disk)] == 0);
}

TEST_CASE("prefetching hides gathers behind compute, and without it they are exposed") {
  Machine machine = fast_machine();
  machine.gather = 1e6;  // a unit of 2 MB on 2 ranks: 1 s
  PlanSetup setup{.model = plain_model(8, 1'000'000), .placement = placement_of_stage(3, 2), .tile_elements = 131072};
  setup.schedule.prefetch = 0;
  const Simulation alone = simulation_of(setup, machine, {1.1, 2.2});
  setup.schedule.prefetch = 1;
  const Simulation ahead = simulation_of(setup, machine, {1.1, 2.2});
  CHECK(alone.exposed[at(Phase::forward)] > 6.0);
  CHECK(ahead.exposed[at(Phase::forward)] < 1.1);  // the first one's, which follows its update
  CHECK(ahead.seconds < alone.seconds - 10.0);
}

TEST_CASE("units kept by Belady's rule are not gathered again, so more memory means fewer bytes") {
  PlanSetup setup{.model = plain_model(8, 1'000'000), .placement = placement_of_stage(3, 2), .tile_elements = 131072};
  constexpr std::size_t unit = 2'000'384;
  std::size_t before = SIZE_MAX;
  for (const std::size_t units : {2u, 4u, 6u, 8u}) {
    setup.schedule.gathered_bytes = units * unit;
    const std::size_t bytes = simulation_of(setup, fast_machine(), {}).bytes[at(Lane::gather)];
    CHECK(bytes == (16 - units) * unit / 2);  // the last units' backward, and of all units in this step or the next
    CHECK(bytes < before);
    before = bytes;
  }
}

TEST_CASE("the memory for gathered units has room for prefetching, and for no more than all units") {
  PlanSetup setup{.model = plain_model(8, 1'000'000), .placement = placement_of_stage(3, 2), .tile_elements = 131072};
  constexpr std::size_t unit = 2'000'384;
  for (const auto& [asked, reserved] :
       {std::pair{std::size_t{0}, 2 * unit}, {1, 2 * unit}, {3 * unit, 3 * unit}, {SIZE_MAX, 8 * unit}}) {
    setup.schedule.gathered_bytes = asked;
    const CompiledPlan plan = plan_of(setup);
    const auto gathered = std::ranges::find(plan.program().slots, SlotRole::gathered, &Slot::role);
    REQUIRE(gathered != plan.program().slots.end());
    CHECK(gathered->bytes == reserved);
  }
}

TEST_CASE("micro-steps whose units all stay gathered gather once in a step") {
  PlanSetup setup{.model = plain_model(8, 1'000'000), .placement = placement_of_stage(3, 2), .tile_elements = 131072};
  setup.micro_steps = 4;
  setup.schedule.gathered_bytes = SIZE_MAX;
  CHECK(simulation_of(setup, fast_machine(), {}).bytes[at(Lane::gather)] == 8 * 1'000'192);
}

TEST_CASE("updates on the drive overlap with the next forward pass") {
  Machine machine = fast_machine();
  machine.read = machine.write = 100e6;
  PlanSetup setup{.model = plain_model(8, 1'000'000), .placement = placement_of_stage(3, 2), .tile_elements = 131072};
  setup.placement.state = Tier::nvme;
  setup.full_records = true;
  setup.schedule.most_repeats = 0;
  const Simulation step = simulation_of(setup, machine, {0.02, 0.04});
  const double disk = step.busy[at(Lane::disk)];
  CHECK(disk > 0.9);
  CHECK(step.seconds < disk + 8 * 0.06);  // they do not follow one after the other
  CHECK(step.seconds > disk);
  CHECK(step.critical[at(Lane::disk)] > 0.8 * disk);  // the drive is most of the critical path
}

TEST_CASE("updates before the norm take the time of updates without clipping, but for the last unit's") {
  Machine machine = fast_machine();
  machine.read = machine.write = 500e6;
  PlanSetup setup{.model = plain_model(8, 1'000'000), .placement = placement_of_stage(3, 2), .tile_elements = 131072};
  setup.placement.state = Tier::nvme;
  setup.full_records = true;
  const auto seconds = [&] { return simulation_of(setup, machine, {0.005, 0.02}).seconds; };
  const double early = seconds();
  setup.schedule.update_in_backward = true;
  CHECK(early == Approx(seconds()).epsilon(0.01));
  setup.schedule = {.most_repeats = 0};
  CHECK(seconds() > 1.2 * early);
}

TEST_CASE("parameters on the drive are read as soon as they are written, ahead of pending updates") {
  Machine machine = fast_machine();
  machine.read = machine.write = 100e6;
  PlanSetup setup{.model = plain_model(8, 1'000'000), .placement = placement_of_stage(3, 2), .tile_elements = 131072};
  setup.placement.parameters = setup.placement.state = Tier::nvme;
  const Simulation step = simulation_of(setup, machine, {0.2, 0.1});
  const double a_unit = step.busy[at(Lane::disk)] / 8 + step.busy[at(Lane::fetch)] / 16;  // updated, and read again
  CHECK(step.busy[at(Lane::disk)] > 0.9);
  CHECK(step.exposed[at(Phase::forward)] > a_unit);
  CHECK(step.exposed[at(Phase::forward)] < 3 * a_unit);  // forward waits for updates of the first units, not of all
}

TEST_CASE("a trainer that waits for updates does so after its compute, and waits for nothing else") {
  Machine machine = fast_machine();
  machine.read = machine.write = 100e6;
  PlanSetup setup{.model = plain_model(8, 1'000'000), .placement = placement_of_stage(3, 2), .tile_elements = 131072};
  setup.placement.state = Tier::nvme;
  const Simulation overlapped = simulation_of(setup, machine, {0.02, 0.04});
  const Simulation waited = simulation_of(setup, machine, {0.02, 0.04}, true);
  const double disk = waited.busy[at(Lane::disk)];
  CHECK(waited.seconds > overlapped.seconds + 0.1);
  CHECK(waited.seconds < disk + 8 * 0.06 + 0.01);
  CHECK(waited.seconds == Approx(8 * 0.06 + waited.exposed[at(Phase::forward)] + waited.exposed[at(Phase::backward)] +
                                 waited.exposed[at(Phase::step)]));
  CHECK(waited.exposed[at(Phase::step)] > 0.9 * (waited.seconds - 8 * 0.06));
  CHECK(waited.critical[at(Lane::disk)] > 0.8 * disk);
}

TEST_CASE("a task on a shared processor fills the free time, in pieces") {
  SharedTime time;
  const auto check = [&](std::size_t task, double from, double seconds, const SharedTime::Taken& expected) {
    const SharedTime::Taken taken = time.take(task, from, seconds);
    CAPTURE(task);
    CHECK(taken.begin == expected.begin);
    CHECK(taken.end == expected.end);
    CHECK(taken.after == expected.after);
  };
  check(0, 2, 2, {2, 4, SharedTime::no_task});
  check(1, 0, 3, {4, 5, 0});  // 0 to 2, and after the other one
  check(2, 6, 1, {6, 7, SharedTime::no_task});
  check(3, 3, 2, {7, 8, 2});  // 5 to 6, 7 to 8
  check(4, 3, 0, {3, 3, SharedTime::no_task});
  check(5, 9, 1, {9, 10, SharedTime::no_task});
}

TEST_CASE("where all lanes share a CPU, only the drive works in parallel with the trainer") {
  PlanSetup setup{.model = plain_model(8, 1'000'000), .placement = placement_of_stage(3, 2), .tile_elements = 131072};
  Machine machine = fast_machine();
  machine.host_memory = machine.device_memory = 1e9;
  machine.gather = machine.reduce = 1e8;
  machine.shares_cores = true;
  const UnitWork work{0.02, 0.04};
  const Simulation shared = simulation_of(setup, machine, work);
  double all = 0;
  for (std::size_t lane = 0; lane < lane_count; ++lane)
    all += shared.busy[lane];
  CHECK(shared.seconds ==
        Approx(all));  // agreements alone leave the processor idle, and no two lanes use it at the same time
  CHECK(shared.critical[at(Lane::compute)] + shared.critical[at(Lane::gather)] <= shared.seconds * (1 + 1e-9));
  setup.placement.state = Tier::nvme;
  machine.read = machine.write = 200e6;
  const Simulation with_drive = simulation_of(setup, machine, work);
  all = 0;
  for (std::size_t lane = 0; lane < lane_count; ++lane)
    all += with_drive.busy[lane];
  CHECK(with_drive.seconds < 0.8 * all);
  CHECK(with_drive.seconds > all - with_drive.busy[at(Lane::disk)]);
}

TEST_CASE("the timeline has the times of a step, of the trainer and of what overlaps with it") {
  Machine machine = fast_machine();
  machine.read = machine.write = 100e6;
  PlanSetup setup{.model = plain_model(8, 1'000'000), .placement = placement_of_stage(3, 2), .tile_elements = 131072};
  setup.placement.state = Tier::nvme;
  const CompiledPlan plan = plan_of(setup);
  const std::vector<UnitWork> work(8, {0.02, 0.04});
  const SimulationInput input{plan.program(), setup.placement, machine, work};
  const Simulation step = simulate(input);
  std::array<double, lane_count> busy{};
  std::array<double, lane_count> last{};
  double end_of_trainer = 0;
  std::size_t is_earlier_steps = 0;
  for (const SimulatedOp& ran : timeline_of(input)) {
    const Op& op = plan.program().ops[ran.op];
    CAPTURE(ran.op, ran.begin, ran.end);
    CHECK(ran.end > 0);
    CHECK(ran.begin < step.seconds);
    CHECK(ran.begin >= last[at(op.lane)]);  // one after another in each lane
    last[at(op.lane)] = ran.end;
    busy[at(op.lane)] += std::min(ran.end, step.seconds) - std::max(ran.begin, 0.0);
    is_earlier_steps += ran.is_earlier_steps ? 1 : 0;
    if (op.kind == OpKind::use || op.kind == OpKind::agree) end_of_trainer = ran.end;
    if (op.kind == OpKind::use) CHECK((ran.begin >= 0 && !ran.is_earlier_steps));
    if (ran.begin < 0) CHECK(ran.is_earlier_steps);
    if (op.kind == OpKind::use) CHECK(ran.end - ran.begin == Approx(op.phase == Phase::forward ? 0.02 : 0.04));
  }
  CHECK(end_of_trainer == Approx(step.seconds));
  CHECK(busy[at(Lane::compute)] == Approx(step.busy[at(Lane::compute)]));
  CHECK(busy[at(Lane::disk)] == Approx(step.busy[at(Lane::disk)]).epsilon(0.01));
  CHECK(is_earlier_steps > 0);
}

TEST_CASE("the ledger sums the bytes that a program reserves, by tier and owner") {
  PlanSetup setup{.model = plain_model(2), .placement = placement_of_stage(3, 2), .tile_elements = 128};
  setup.placement.state = Tier::nvme;
  setup.schedule.staging_slots = 4;
  const CompiledPlan plan = plan_of(setup);
  const Ledger ledger = ledger_of(plan.program(), plan.blocks().records());
  std::size_t slots = 0;
  for (const Slot& slot : plan.program().slots)
    slots += slot.bytes;
  CHECK(bytes_in(ledger, Tier::device) + bytes_in(ledger, Tier::host) == slots);
  CHECK(bytes_in(ledger, Tier::nvme) == 2 * 2 * 8192);  // units, tiles of each
  CHECK(std::ranges::find(ledger, LedgerEntry{Tier::host, "staging", 4 * 8192}) != ledger.end());
  CHECK_THAT(to_text(ledger), Contains("staging") && Contains("nvme"));
}

TEST_CASE("a higher stage and a lower tier need less memory on the device") {
  const Model model = plain_model(8, 10'000);
  for (const Tier tier : {Tier::device, Tier::host}) {
    std::size_t before = SIZE_MAX;
    for (const int stage : {0, 1, 3}) {
      PlanSetup setup{.model = model, .placement = placement_of_stage(stage, 2)};
      setup.placement.state = setup.placement.gradients = Spread(tier);
      const CompiledPlan plan = plan_of(setup);
      const std::size_t bytes = bytes_in(ledger_of(plan.program(), plan.blocks().records()), Tier::device);
      CHECK(bytes < before);
      before = bytes;
    }
  }
}

TEST_CASE("the chosen placement fits, and fills each tier before it uses a slower one") {
  const Model model = llama(llama_8b);
  const std::vector<UnitWork> work(model.units.size(), {0.01, 0.03});
  ChoiceInput input = asking(model, work, 4);
  const Choice roomy = choose(input);
  CHECK(roomy.placement.state == Tier::device);
  CHECK(fits(roomy.ledger, input.machine));
  if (sanitized) return;  // the next searches take minutes, and the next test makes one like them

  input.machine.bytes[0] = 24 * gib;
  const Choice tight = choose(input);
  CHECK(fits(tight.ledger, input.machine));
  CHECK(tight.simulation.seconds >= roomy.simulation.seconds);
  CHECK(bytes_in(tight.ledger, Tier::host) > 4 * gib);
  CHECK(bytes_in(tight.ledger, Tier::device) > 20 * gib);  // the rest of the device holds state

  input.machine.bytes[1] = 4 * gib;
  const Choice on_drives = choose(input);
  CHECK(fits(on_drives.ledger, input.machine));
  CHECK(on_drives.placement.state.nvme > 0.0);
  CHECK(on_drives.simulation.seconds > tight.simulation.seconds);
}

TEST_CASE("where host and device share their memory, one budget covers both, and no state is placed on the host") {
  const Model model = llama(llama_8b);
  const std::vector<UnitWork> work(model.units.size());
  ChoiceInput input = asking(model, work, 4);
  input.machine.host_is_device = GENERATE(true, false);  // a CPU, and a GPU that shares its memory
  input.machine.one_pool = true;
  CHECK(choose(input).placement.state == Tier::device);

  input.machine.bytes[0] = 24 * gib;
  const Choice tight = choose(input);
  const TierBytes needed = needs(tight.ledger, input.machine);
  CHECK(tight.placement.state.nvme > 0.0);
  CHECK(tight.placement.state.host + tight.placement.gradients.host + tight.placement.parameters.host == 0.0);
  CHECK(bytes_in(tight.ledger, Tier::host) > 0);  // records on their way
  CHECK(needed[0] == bytes_in(tight.ledger, Tier::device) + bytes_in(tight.ledger, Tier::host));
  CHECK(needed[1] == 0);
  CHECK(needed[0] <= 24 * gib);
  CHECK(needed[0] > 20 * gib);
}

TEST_CASE("a placement is chosen for the trainer's order of uses") {
  const Model model = plain_model(3, 1'000'000);
  const std::vector<UnitWork> work(model.units.size());
  ChoiceInput input{.model = model,
                    .machine = fast_machine(),
                    .work = work,
                    .ranks = 2,
                    .stage = 3,
                    .names = optim::AdamW::state,
                    .trace = {{2, Phase::backward}, {0, Phase::backward}, {1, Phase::backward}}};
  const CompiledPlan plan(model, {.placement = placement_of_stage(3, 2), .names = input.names, .trace = input.trace});
  CHECK(price(input, placement_of_stage(3, 2)).ledger == ledger_of(plan.program(), plan.blocks().records()));
  const Choice backwards = choose(input);
  input.trace = {};
  CHECK(backwards.simulation.bytes != choose(input).simulation.bytes);
}

TEST_CASE("two tiers hold the state together where neither holds it alone") {
  const Model model = llama(llama_8b);
  const std::vector<UnitWork> work(model.units.size());
  ChoiceInput input = asking(model, work, 4);
  input.machine.bytes = {24 * gib, 16 * gib, 0};
  for (const Placement& placement : pure_placements(input)) {
    CHECK_FALSE(fits(memory_of(input, placement), input.machine));
  }
  const Choice shared = choose(input);
  CHECK(fits(shared.ledger, input.machine));
  CHECK(bytes_in(shared.ledger, Tier::device) > 20 * gib);
  CHECK(bytes_in(shared.ledger, Tier::host) > 4 * gib);
}

TEST_CASE("all tiers hold together what no two of them hold") {
  const Model model = llama(llama_8b);
  const std::vector<UnitWork> work(model.units.size());
  ChoiceInput input = asking(model, work, 1);
  input.stage = {};
  input.format = StateFormat::four_bit;
  input.schedule.update_in_backward = true;
  input.machine.bytes = {16 * gib, 12 * gib, 30 * gib};
  const Choice filled = choose(input);
  CHECK(fits(filled.ledger, input.machine));
  const Placement& placement = filled.placement;
  CHECK(placement.parameters.device > 0.3);
  CHECK(placement.parameters.host > 0.1);
  CHECK(placement.state.nvme > 0.1);
  const TierBytes needed = needs(filled.ledger, input.machine);
  for (const Tier tier : {Tier::device, Tier::host}) {  // nearer tiers are nearly full
    CHECK(10 * needed[static_cast<std::size_t>(tier)] > 9 * input.machine.bytes[static_cast<std::size_t>(tier)]);
  }
  input.machine.bytes[2] = 8 * gib;
  CHECK_THROWS_WITH(choose(input), Contains("B2004") && Contains("nvme"));
  input.stage = 2;
  CHECK_THROWS_WITH(choose(input), Contains("B2004"));
}

TEST_CASE("where nothing fits, the error names the memory that is short") {
  const Model model = llama(llama_8b);
  const std::vector<UnitWork> work(model.units.size());
  ChoiceInput input = asking(model, work, 2);
  input.stage = 0;
  input.machine.bytes = {40 * gib, 60 * gib, 0};
  CHECK_THROWS_WITH(choose(input), Contains("B2004") && Contains("device") && Contains("reduced") &&
                                       Contains("updates in the backward pass"));
  input.machine.bytes = {gib, gib, 0};
  CHECK_THROWS_WITH(choose(input), Contains("more memory, drives or ranks") && !Contains("would fit"));
}

TEST_CASE("70B on 8 and on 1,024 ranks with state on drives is planned on this machine") {
  const Model model = llama(llama_70b);
  std::size_t parameters = 0;
  for (const Unit& unit : model.units) {
    for (const Tensor& tensor : unit.tensors)
      parameters += tensor.elements();
  }
  const std::vector<UnitWork> work(model.units.size(), {0.01, 0.02});
  for (const std::size_t ranks : {8u, 1024u}) {
    ChoiceInput input{
        .model = model, .machine = fast_machine(), .work = work, .ranks = ranks, .names = optim::AdamW::state};
    Placement placement = placement_of_stage(3, ranks);
    placement.state = Tier::nvme;
    const auto bytes_on_drives = [&](bool full_records) {
      input.full_records = full_records;
      const Choice choice = price(input, placement);
      CHECK(choice.simulation.seconds > 0.0);
      return bytes_in(choice.ledger, Tier::nvme);
    };
    const std::size_t of_state = bytes_on_drives(false);
    CHECK(of_state >= 10 * parameters / ranks);
    CHECK(static_cast<double>(bytes_on_drives(true)) == Approx(2.4 * static_cast<double>(of_state)).epsilon(0.01));
  }
}

namespace {

Placement with_state_on_host() {
  Placement placement = placement_of_stage(2, 1);
  placement.state = Tier::host;
  return placement;
}

// Everything on the host but this part of the parameters.
Placement with_parameters_on_device(double part) {
  Placement placement = placement_of_stage(3, 1);
  placement.parameters = {part, 1 - part, 0};
  placement.gradients = placement.state = Tier::host;
  return placement;
}

// A step of an 8B Llama on one GPU, with compact state, gradients in bf16, and by default parameters and gradients on the device.
// Forward takes a third of the seconds of its arithmetic.
Simulation step_of_8b(const Machine& machine, double arithmetic, bool has_visitors,
                      const Placement& placement = with_state_on_host()) {
  const Model model = llama(llama_8b);
  PlanOptions options{.placement = placement,
                      .format = StateFormat::compact,
                      .gradient_format = GradientFormat::bf16,
                      .names = optim::AdamW::state};
  if (has_visitors) options.rates = {machine.upload, machine.download, machine.host_memory};
  const CompiledPlan plan(model, options);
  double elements = 0;
  for (const UnitLayout& unit : plan.layout().units)
    elements += static_cast<double>(unit.elements());
  std::vector<UnitWork> work;
  for (const UnitLayout& unit : plan.layout().units) {
    const double seconds = arithmetic * static_cast<double>(unit.elements()) / elements;
    work.push_back({seconds / 3, seconds * 2 / 3});
  }
  return simulate({plan.program(), options.placement, machine, work});
}

Machine machine_of(double link, double host_memory, double device_memory) {
  return {.upload = link, .download = link, .device_memory = device_memory, .host_memory = host_memory};
}

}  // namespace

TEST_CASE("copies over links take of the host's memory what its updates then lack") {
  PlanSetup setup{.model = plain_model(4, 20'000'000),
                  .placement = placement_of_stage(2, 1),
                  .tile_elements = std::size_t{1} << 18};
  setup.placement.state = Tier::host;
  Machine machine = fast_machine();
  machine.device_memory = 1e15;
  const auto bytes = [](const Simulation& of, std::initializer_list<Lane> lanes) {
    double sum = 0;
    for (const Lane lane : lanes)
      sum += static_cast<double>(of.bytes[at(lane)]);
    return sum;
  };
  const Simulation shared = simulation_of(setup, machine, {});
  CHECK(bytes(shared, {Lane::upload}) > 0);
  CHECK(bytes(shared, {Lane::download}) > 0);
  CHECK(shared.seconds ==
        Approx(bytes(shared, {Lane::host, Lane::upload, Lane::download}) / machine.host_memory).epsilon(0.02));
  machine.host_updates = machine.host_memory / 2;  // arithmetic limits them: memory is left for copies
  const Simulation slow = simulation_of(setup, machine, {});
  CHECK(slow.seconds == Approx(bytes(slow, {Lane::host}) / machine.host_updates).epsilon(0.02));
}

TEST_CASE("a step is a third faster if a GPU updates tiles whose state is on the host, with the host") {
  const Machine desktop = machine_of(25e9, 60e9, 0.85e12);
  const Machine server = machine_of(50e9, 120e9, 4e12);
  // 16 bytes of each element pass the host's memory: 12 in its update, and 2 in a copy each way.
  CHECK(step_of_8b(desktop, 1.54, false).seconds == Approx(3.22).epsilon(0.03));
  CHECK(step_of_8b(desktop, 1.54, true).seconds < 2.1);
  CHECK(step_of_8b(server, 0.82, false).seconds == Approx(1.65).epsilon(0.03));
  CHECK(step_of_8b(server, 0.82, true).seconds < 1.05);
}

TEST_CASE("copies and updates together move no more bytes of the host's memory than its rate") {
  const Machine machine = machine_of(60e9, 60e9, 1e15);
  for (const double part : {0.3, 0.5, 0.7}) {
    const Simulation step = step_of_8b(machine, 0, true, with_parameters_on_device(part));
    double bytes = 0;
    for (const Lane lane : {Lane::host, Lane::upload, Lane::download})
      bytes += static_cast<double>(step.bytes[at(lane)]);
    CHECK(step.seconds == Approx(bytes / machine.host_memory).epsilon(0.002));
  }
}

TEST_CASE("the host updates units that are there while the device updates the others") {
  const Machine desktop = machine_of(25e9, 60e9, 0.85e12);
  const auto seconds = [&](double part) {
    return step_of_8b(desktop, 1.54, true, with_parameters_on_device(part)).seconds;
  };
  const double all_there = seconds(1);
  CHECK(all_there == Approx(2.44).epsilon(0.01));
  CHECK(seconds(0.7) < 1.01 * all_there);  // in 3.7 GiB less of the device
  CHECK(seconds(0.5) < 1.06 * all_there);
  CHECK(seconds(0) > 1.2 * all_there);
}
