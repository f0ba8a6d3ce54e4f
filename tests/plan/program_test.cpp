#include <ballast/error.h>

#include "zero/plan/program.h"

#include <catch2/catch.hpp>
#include <fstream>
#include <map>
#include <sstream>

#include "kernels/runtime/host_pages.h"
#include "tests/plan/plan_rig.h"
#include "tests/plan/verify.h"
#include "zero/plan/compile.h"
#include "zero/plan/program_cost.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

PlanSetup setup_of(int stage, std::size_t ranks, const Spread& state) {
  PlanSetup setup{.model = plain_model(3), .placement = placement_of_stage(stage, ranks), .tile_elements = 128};
  setup.placement.state = state;
  setup.schedule.staging_slots = 4;
  return setup;
}

PlanSetup state_on_drives(bool full_records, bool host_is_device = false) {
  PlanSetup setup = setup_of(3, 2, Tier::nvme);
  setup.full_records = full_records;
  setup.schedule.most_repeats = 0;
  setup.host_is_device = host_is_device;
  return setup;
}

PlanSetup updated_early() {
  PlanSetup setup = state_on_drives(true);
  setup.schedule.most_repeats = Schedule{}.most_repeats;
  setup.schedule.kept_records = 1;
  return setup;
}

PlanSetup all_on_drives() {
  PlanSetup setup = setup_of(3, 2, Tier::nvme);
  setup.placement.parameters = Tier::nvme;
  setup.schedule.update_in_backward = true;
  return setup;
}

PlanSetup by_layers() {
  PlanSetup setup = all_on_drives();
  setup.micro_steps = 2;
  setup.schedule.layer_major = true;
  return setup;
}

PlanSetup mesh_on_host(GradientFormat gradient_format) {
  PlanSetup setup = setup_of(3, 2, Tier::host);
  setup.placement.replicas = 2;
  setup.placement.gradients = Tier::host;
  setup.micro_steps = 2;
  setup.gradient_format = gradient_format;
  return setup;
}

PlanSetup encoded_mesh() {
  PlanSetup setup = setup_of(3, 2, Tier::device);
  setup.placement.replicas = 2;
  setup.wire = {.gather = WireFormat::int8, .reduce = WireFormat::int8, .across = WireFormat::int4};
  return setup;
}

// The device updates a part of the tiles whose state is on the host.
PlanSetup state_on_host() {
  PlanSetup setup = setup_of(2, 1, Tier::host);
  setup.model = plain_model(2, 600);
  setup.rates = {.upload = 1, .download = 1, .host_memory = 2.4};
  return setup;
}

// Each device copies the parameters of all ranks from the memory of the host, whose processor sums their gradients.
PlanSetup through_the_host() {
  PlanSetup setup = setup_of(3, 2, Tier::host);
  setup.placement.parameters = setup.placement.gradients = Tier::host;
  setup.shares_memory = true;
  setup.rates = {.upload = 1, .download = 1, .host_memory = 3, .peers = 0.1, .shared = 1};
  return setup;
}

PlanSetup muon_on_drives() {
  PlanSetup setup = with_muon(state_on_drives(true));
  setup.model = matrix_model();
  setup.model.units.erase(setup.model.units.begin() + 1, setup.model.units.begin() + 3);
  setup.model.units[1].ties.clear();
  return setup;
}

PlanSetup copies_of_parameters() {
  PlanSetup setup = setup_of(3, 4, Tier::host);
  setup.placement.parameter_replicas = 2;
  return setup;
}

const std::map<std::string, PlanSetup> characteristic{
    {"stage0_alone", setup_of(0, 1, Tier::device)},
    {"stage2_device", setup_of(2, 2, Tier::device)},
    {"stage3_nvme", state_on_drives(true)},
    {"stage3_nvme_early", updated_early()},
    {"stage3_nvme_scratch", state_on_drives(false)},
    {"stage3_nvme_scratch_cpu", state_on_drives(false, true)},
    {"all_on_drives_update_in_backward", all_on_drives()},
    {"all_on_drives_layer_major", by_layers()},
    {"mesh_on_host_two_micro_steps", mesh_on_host(GradientFormat::fp32)},
    {"mesh_on_host_gradients_in_bf16", mesh_on_host(GradientFormat::bf16)},
    {"mesh_encoded", encoded_mesh()},
    {"stage2_state_on_host", state_on_host()},
    {"stage3_nvme_muon", muon_on_drives()},
    {"copies_of_parameters", copies_of_parameters()},
    {"stage3_through_the_host", through_the_host()},
};

// Returns the texts of the programs, and of one's off-plan lists: after the first backward use, the trainer uses the
// first unit instead of the next.
std::map<std::string, std::string> texts() {
  std::map<std::string, std::string> texts;
  for (const auto& [name, setup] : characteristic)
    texts[name] = to_text(plan_of(setup).program());
  const CompiledPlan plan = plan_of(state_on_drives(true));
  const auto text = [](const CompiledPlan& of, std::vector<Op> ops) {
    return to_text({.slots = of.program().slots, .homes = {}, .entry = {}, .ops = std::move(ops)});
  };
  const CompiledPlan early = plan_of(updated_early());
  texts["stage3_nvme_early_repeat"] = text(early, compile_repeat(early.input()));
  texts["stage3_nvme_early_undo"] = text(early, compile_undo(early.input()));
  const Visit next{0, Phase::backward};
  const Trace trace = declared_order(plan.model());
  OffPlanStep step{.visits = {trace.begin(), trace.begin() + 4}, .by_program = 4};
  texts["stage3_nvme_off_plan_use"] = text(plan, compile_visits(plan.input(), step, {next}));
  step.visits.push_back(next);
  texts["stage3_nvme_off_plan_step"] = text(plan, compile_step(plan.input(), step));
  return texts;
}

std::string read_file(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

std::string path_of(const std::string& name) { return BALLAST_SOURCE_DIR "/tests/plan/golden/" + name + ".txt"; }

}  // namespace

TEST_CASE("characteristic programs are equal to the golden files (write those with: test_plan '[write-golden]')") {
  for (const auto& [name, text] : texts()) {
    CAPTURE(name);
    CHECK(text == read_file(path_of(name)));
  }
}

TEST_CASE("a trace need not name the owners of tied tensors") {
  PlanSetup setup = setup_of(3, 2, Tier::host);
  setup.model = odd_model();
  const std::string expected = to_text(plan_of(setup).program());
  setup.trace = declared_order(setup.model);
  CHECK(std::erase_if(setup.trace, [](const Visit& visit) { return visit.held; }) == 2);
  CHECK(to_text(plan_of(setup).program()) == expected);
  setup.trace.insert(setup.trace.begin(), {.unit = 1, .held = true});  // unit 1 owns no tensor of the next one
  CHECK(to_text(plan_of(setup).program()) == expected);
}

TEST_CASE("a tensor belongs to a unit") {
  Model model;
  CHECK_THROWS_WITH(model.tensor({"w", {3}}), Catch::Contains("B1001") && Catch::Contains("cannot add tensor w"));
  CHECK_THROWS_WITH(model.tied("head", {}), Catch::Contains("B1001") && Catch::Contains("a call of unit() before"));
}

TEST_CASE("write the golden programs", "[.][write-golden]") {
  for (const auto& [name, text] : texts()) {
    CHECK(std::ofstream(path_of(name)) << text);
  }
}

TEST_CASE("with overlapping gathers, the operations of the last step that a forward use awaits are marked") {
  for (const std::size_t ranks : {1u, 2u}) {
    for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
      PlanSetup setup = setup_of(ranks == 1 ? 0 : 2, ranks, Spread(tier));
      setup.schedule.overlap_gathers = true;
      const CompiledPlan plan = plan_of(setup);
      const std::vector<Op>& list = plan.program().ops;
      std::size_t awaited = 0;
      for (const Op& use : list) {
        if (use.kind != OpKind::use || use.phase != Phase::forward) continue;
        for (const Wait& wait : use.after) {
          if (!wait.is_last_steps) continue;
          CAPTURE(ranks, static_cast<int>(tier), use.unit, wait.op);
          CHECK(list[wait.op].is_marked);
          CHECK(list[wait.op].unit == use.unit);
          ++awaited;
        }
      }
      CHECK(awaited >= 3);  // each of the three units
    }
  }
}

TEST_CASE("memory for the next gradients is cleared before a reduction, also where parameters are used in between") {
  PlanSetup setup = setup_of(3, 2, Tier::device);
  setup.trace = order_in_torch(setup.model);
  const CompiledPlan plan = plan_of(setup);
  CHECK(verify(plan.input(), plan.program()).empty());
  const auto position_of = [&](OpKind kind, std::size_t unit) {
    return std::ranges::find_if(plan.program().ops, [&](const Op& op) { return op.kind == kind && op.unit == unit; });
  };
  for (const std::size_t unit : {1u, 2u}) {
    CHECK(position_of(OpKind::clear, unit - 1) < position_of(OpKind::reduce, unit));
  }
}

TEST_CASE("the next unit is gathered while one is used, also where a unit is visited twice in a row") {
  PlanSetup setup = setup_of(3, 2, Tier::device);
  setup.model = plain_model(4);
  setup.trace = order_in_torch(setup.model);
  const CompiledPlan plan = plan_of(setup);
  CHECK(verify(plan.input(), plan.program()).empty());
  const std::vector<Op>& ops = plan.program().ops;
  const auto first =
      std::ranges::find(ops, OpKind::reduce, &Op::kind);  // that of the last unit, at the beginning of backward
  for (const std::size_t unit : {1u, 0u}) {
    const auto of = [&](OpKind kind, std::size_t which) {
      return std::find_if(first, ops.end(), [&](const Op& op) { return op.kind == kind && op.unit == which; });
    };
    CHECK(of(OpKind::gather, unit) < of(OpKind::use, unit + 1));
  }
}

TEST_CASE("with memory for some or all units, as many are gathered before the step ends") {
  for (const std::size_t units : {2u, 3u, 6u}) {
    PlanSetup setup = setup_of(3, 2, Tier::device);
    setup.model = plain_model(6);
    setup.schedule.gathered_bytes = units * 1024;  // 300 elements of 2 bytes, in shards of whole groups
    const CompiledPlan plan = plan_of(setup);
    CAPTURE(units);
    CHECK(verify(plan.input(), plan.program()).empty());
    const auto is_gather = [](const Op& op) { return op.kind == OpKind::gather; };
    const std::vector<Op>& step = plan.program().ops;
    const auto agreement = std::ranges::find(step, OpKind::agree, &Op::kind);
    CHECK(std::count_if(agreement, step.end(), is_gather) == static_cast<std::ptrdiff_t>(units));
    CHECK(std::ranges::count_if(plan.program().entry, is_gather) == static_cast<std::ptrdiff_t>(units));
  }
}

TEST_CASE("staged records share whole huge pages, and small ones take no more than their bytes") {
  for (const std::size_t elements : {1024u, 230'016u}) {
    PlanSetup setup = setup_of(3, 1, Tier::nvme);
    setup.model = plain_model(8, elements);
    setup.tile_elements = elements;
    setup.schedule.kept_records = 3;
    const CompiledPlan plan = plan_of(setup);
    for (const auto& [role, records] : {std::pair{SlotRole::staging, 4u}, {SlotRole::kept, 3u}}) {
      const auto slot = std::ranges::find(plan.program().slots, role, &Slot::role);
      REQUIRE(slot != plan.program().slots.end());
      const std::size_t needed = records * plan.blocks().records().record;
      CAPTURE(name(role), needed);
      if (needed < 2 * huge_page_bytes) {
        CHECK(slot->bytes == needed);
      } else {
        CHECK(slot->bytes % huge_page_bytes == 0);
        CHECK(slot->bytes >= needed);
        CHECK(slot->bytes < needed + huge_page_bytes);
      }
    }
  }
}

TEST_CASE("frozen parameters are in the tier of parameters, and no step writes those on drives") {
  for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
    for (const std::size_t ranks : {1u, 2u, 3u}) {
      PlanSetup setup = setup_of(3, ranks, Spread(tier));
      setup.model = odd_model();
      setup.placement.parameters = Spread(tier);
      const CompiledPlan plan = plan_of(setup);
      CAPTURE(name(tier), ranks);
      CHECK(verify(plan.input(), plan.program()).empty());
      std::size_t elements = 0;
      std::map<std::pair<std::size_t, std::size_t>, std::size_t> reads;
      for (const UnitLayout& unit : plan.layout().units)
        elements += unit.frozen.shard;
      for (const Home& home : plan.program().homes) {
        if (!home.frozen) continue;
        elements -= home.range.count;
        reads[{home.unit, home.tile}] = 0;
      }
      for (const Op& op : plan.program().ops) {
        if (op.kind == OpKind::read_first && reads.contains({op.unit, op.tile})) ++reads[{op.unit, op.tile}];
        if (op.kind == OpKind::write || op.kind == OpKind::read) CHECK_FALSE(reads.contains({op.unit, op.tile}));
      }
      const Ledger ledger = ledger_of(plan.program(), plan.blocks().records());
      const auto frozen = std::ranges::find(ledger, "frozen", &LedgerEntry::owner);
      CHECK((frozen == ledger.end() ? Tier::device : frozen->tier) == tier);
      CHECK(plan.frozen_on_drive() == reads.size());
      if (tier != Tier::nvme) continue;
      CHECK(elements == 0);
      CHECK(std::ranges::all_of(reads, [](const auto& read) { return read.second > 0; }));
    }
  }
}

TEST_CASE("a unit of bytes is frozen, and no gather encodes it") {
  PlanSetup setup = setup_of(3, 2, Tier::host);
  setup.wire.gather = WireFormat::int8;
  setup.model.units.push_back({.name = "packed", .dtype = DType::u8, .tensors = {{"codes", {1001}, 0, true}}});
  const std::size_t packed = setup.model.units.size() - 1;
  const CompiledPlan plan = plan_of(setup);
  CHECK(verify(plan.input(), plan.program()).empty());
  std::size_t exact = 0;
  for (const Op& op : plan.program().ops) {
    if (op.kind != OpKind::gather) continue;
    CHECK(op.codes.exist() == (op.unit != packed));
    exact += op.unit == packed ? 1 : 0;
  }
  CHECK(exact >= 1);
}

TEST_CASE("the compiler refuses wrong input and names the fault") {
  const auto refuses = [](const auto& change) {
    PlanSetup setup = setup_of(3, 2, Tier::host);
    change(setup);
    return [setup] { plan_of(setup); };
  };
  const auto message = [](const auto& compile) {
    try {
      compile();
    } catch (const UsageError& error) {
      return std::string(error.what());
    } catch (const ResourceError& error) {
      return std::string(error.what());
    }
    return std::string("nothing is wrong");
  };
  const auto problem = [&](const auto& change) { return message(refuses(change)); };
  using Catch::Contains;
  CHECK_THAT(problem([](PlanSetup&) {}), Contains("nothing is wrong"));
  CHECK_THAT(problem([](PlanSetup& s) { s.model.units.clear(); }), Contains("at least one unit"));
  CHECK_THAT(problem([](PlanSetup& s) { s.model.units[1].name = "h.0"; }), Contains("two units are called h.0"));
  CHECK_THAT(problem([](PlanSetup& s) { s.model.units[1].dtype = DType::u8; }), Contains("unit h.1"));
  CHECK_THAT(problem([](PlanSetup& s) {
               s.model.units[1].ties = {{"w", 1, 0}};
             }),
             Contains("w is tied to tensor 0 of unit 1"));
  CHECK_THAT(problem([](PlanSetup& s) {
               s.model.units[0].tensors.push_back({"weight", {1}});
             }),
             Contains("two tensors are called weight"));
  CHECK_THAT(problem([](PlanSetup& s) { s = with_muon(s); }),
             Contains("B1005") && Contains("not a matrix") && Contains("shape [300]") && Contains("such as AdamW"));
  const auto blocks = [&](std::vector<std::size_t> rows) {
    return problem([&](PlanSetup& s) {
      s = with_muon(s);
      s.model = matrix_model();
      s.model.units[0].tensors[2].blocks = rows;
    });
  };
  CHECK_THAT(blocks({20}), Contains("nothing is wrong"));
  CHECK_THAT(blocks({10, 9}), Contains("up into blocks of 10, 9 rows"));
  CHECK_THAT(blocks({20, 0}), Contains("at least one row"));
  CHECK_THAT(blocks({12, 8}), Contains("a group of 128 elements"));
  CHECK_THAT(problem([](PlanSetup& s) { s.micro_steps = 0; }), Contains("no micro-steps"));
  CHECK_THAT(problem([](PlanSetup& s) { s.rank = 2; }), Contains("a rank below 2"));
  CHECK_THAT(problem([](PlanSetup& s) { s.schedule.staging_slots = 0; }), Contains("no slots"));
  CHECK_THAT(problem([](PlanSetup& s) { s.placement.replicas = 0; }), Contains("at least one rank each way"));
  CHECK_THAT(problem([](PlanSetup& s) { s.placement.parameter_replicas = 2; }),
             Contains("several ranks for each copy"));
  CHECK_THAT(problem([](PlanSetup& s) {
               s.placement = placement_of_stage(2, 4);
               s.placement.parameter_replicas = 2;
             }),
             Contains("below stage 3"));
  CHECK_THAT(problem([](PlanSetup& s) {
               s.placement = placement_of_stage(3, 4);
               s.placement.parameter_replicas = s.placement.replicas = 2;
             }),
             Contains("several copies of one of them"));
  CHECK_THAT(problem([](PlanSetup& s) {
               s.placement = placement_of_stage(3, 4);
               s.placement.parameter_replicas = 2;
               s.placement.parameters = Tier::host;
             }),
             Contains("outside of the device"));
  CHECK_THAT(problem([](PlanSetup& s) { s.placement.state = {0.5, 0.2, 0.0}; }), Contains("add up to 1"));
  CHECK_THAT(problem([](PlanSetup& s) { s.placement.gradients = Tier::nvme; }), Contains("on a drive"));
  CHECK_THAT(problem([](PlanSetup& s) {
               s.placement.full_parameters = true;
               s.placement.parameters = Tier::host;
             }),
             Contains("stage 3, or parameters on the device"));
  CHECK_THAT(problem([](PlanSetup& s) {
               s.schedule.update_in_backward = true;
               s.micro_steps = 2;
             }),
             Contains("backward pass of 2 micro-steps"));
  CHECK_THAT(problem([](PlanSetup& s) { s.trace = {{7, Phase::forward}}; }), Contains("a trace visits unit 7"));
  CHECK_THAT(problem([](PlanSetup& s) { s.wire.gather = WireFormat::int4; }), Contains("parameters as int4"));
  CHECK_THAT(problem([](PlanSetup& s) { s.wire.across = WireFormat::int4; }),
             Contains("as exact and sums of them as int4"));
  CHECK_THAT(problem([](PlanSetup& s) { s.wire = {.reduce = WireFormat::int8, .across = WireFormat::exact}; }),
             Contains("as int8 and sums of them as exact"));
  CHECK_THAT(problem([](PlanSetup& s) {
               s.placement = placement_of_stage(2, 2);
               s.wire.gather = WireFormat::int8;
             }),
             Contains("B1005") && Contains("below stage 3") && Contains("leave out gather"));
  CHECK_THAT(problem([](PlanSetup& s) {
               s.placement = placement_of_stage(3, 1);
               s.placement.replicas = 2;
               s.wire.gather = WireFormat::int8;
             }),
             Contains("none are gathered"));
  CHECK_THAT(problem([](PlanSetup& s) {
               s.placement = placement_of_stage(2, 1);
               s.wire.gather = WireFormat::int8;
             }),
             Contains("nothing is wrong"));
  const CompiledPlan replaced = plan_of(setup_of(3, 2, Tier::host));
  CompileInput with_its_memory = replaced.input();
  with_its_memory.gathered_bytes = 1000;
  CHECK_THAT(message([&] { compile(with_its_memory); }),
             Contains("B2004") && Contains("unit h.0") && Contains("keep_gathered="));
  CHECK_THROWS_WITH(make_layout(plain_model(1), 0, 128), Contains("at least one shard"));
  CHECK_THROWS_WITH(make_layout(plain_model(1), 1, 100), Contains("a multiple of 128"));
  CHECK_THROWS_WITH(placement_of_stage(4, 2), Contains("stage 4"));
}
