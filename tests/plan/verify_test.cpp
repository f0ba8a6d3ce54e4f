#include "tests/plan/verify.h"

#include <algorithm>
#include <catch2/catch.hpp>

#include "tests/plan/plan_rig.h"
#include "tests/plan/spreads.h"
#include "tests/plan/without.h"
#include "tests/sanitizer.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

struct Tiers {
  Spread parameters, gradients, state;
};

const std::vector<Tiers> all_tiers{{device, device, device},
                                   {device, device, host},
                                   {device, host, host},
                                   {device, device, nvme},
                                   {device, host, nvme},
                                   {host, device, host},
                                   {host, host, nvme},
                                   {nvme, device, nvme},
                                   {nvme, host, nvme},
                                   {device, {0.5, 0.5, 0}, {0.3, 0.3, 0.4}},
                                   {{0.4, 0.3, 0.3}, {0.5, 0.5, 0}, {0.2, 0.2, 0.6}}};

struct Mesh {
  std::size_t shards, replicas, parameter_replicas = 1;
};

// Returns all placements of a model on a mesh.
std::vector<Placement> placements(const Mesh& mesh) {
  std::vector<Placement> all;
  for (const bool full : {true, false}) {
    if (full && mesh.parameter_replicas > 1) continue;
    for (const Tiers& tiers : all_tiers) {
      if ((full || mesh.parameter_replicas > 1) && !(tiers.parameters == device)) continue;
      for (const Reduction reduction : {Reduction::each, Reduction::boundary}) {
        all.push_back({mesh.shards, mesh.replicas, full, reduction, tiers.parameters, tiers.gradients, tiers.state,
                       mesh.parameter_replicas});
      }
    }
  }
  return all;
}

struct HostUpdates {
  bool full_records, host_is_device;
};

// Returns the options that matter only if updates are made on the host.
std::vector<HostUpdates> host_updates(const Placement& placement) {
  if (placement.state == device) return {{}};
  return {{false, false}, {false, true}, {true, false}, {true, true}};
}

std::vector<std::string> problems_of(const PlanSetup& setup) {
  const CompiledPlan plan = plan_of(setup);
  return verify(plan.input(), plan.program());
}

}  // namespace

TEST_CASE("every model x placement x mesh x schedule compiles to a program without faults") {
  Sweep sweep(11);
  std::size_t programs = 0;
  for (const Model& model : {plain_model(1), plain_model(4), odd_model(), matrix_model()}) {
    for (const Mesh& mesh : {Mesh{1, 1}, Mesh{2, 1}, Mesh{1, 3}, Mesh{3, 2}, Mesh{6, 1, 3}}) {
      for (const Placement& placement : placements(mesh)) {
        for (const Schedule& schedule :
             {Schedule{.prefetch = 0, .staging_slots = 1},
              Schedule{.prefetch = 1, .staging_slots = 4, .kept_records = 2},
              Schedule{.prefetch = 3, .kept_records = 100}, Schedule{.layer_major = true},
              Schedule{.update_in_backward = true}, Schedule{.layer_major = true, .update_in_backward = true}}) {
          for (const std::size_t micro_steps : {1u, 3u}) {
            if (schedule.update_in_backward && !schedule.layer_major && micro_steps > 1) continue;
            if (schedule.layer_major && micro_steps == 1) continue;
            PlanSetup setup{.model = model, .placement = placement, .micro_steps = micro_steps, .schedule = schedule};
            setup.rank = mesh.parameter_replicas > 1 ? 1 : mesh.shards - 1;
            if (programs % 2 == 1) setup.gradient_format = GradientFormat::bf16;
            if (programs % 3 == 1) setup.wire = {.reduce = WireFormat::int8, .across = WireFormat::int4};
            if (programs % 3 == 1 && !placement.full_parameters && mesh.shards > 1)
              setup.wire.gather = WireFormat::int8;
            if (programs % 4 == 2) setup.schedule.gathered_bytes = SIZE_MAX;
            // Tiles on the host are updated by it, by the device, or by both.
            if (programs % 7 > 1) setup.rates = {1, 1, programs % 7 > 3 ? 2.0 : 1e-3};
            if (programs % 3 == 2) setup.shares_memory = true, setup.rates.shared = 1;
            if (programs % 5 == 2) setup.trace = order_in_torch(model);
            if (has_matrices(model)) setup = with_muon(setup);
            for (const HostUpdates& updates : host_updates(placement)) {
              setup.full_records = updates.full_records;
              setup.host_is_device = updates.host_is_device;
              CAPTURE(model.units.size(), mesh.shards, mesh.replicas, mesh.parameter_replicas,
                      placement.full_parameters, static_cast<int>(placement.reduction),
                      placement.parameters.fractions(), placement.gradients.fractions(), placement.state.fractions(),
                      schedule.prefetch, schedule.update_in_backward, micro_steps, setup.full_records,
                      setup.host_is_device);
              if (sweep.takes_next()) CHECK(problems_of(setup) == std::vector<std::string>{});
              ++programs;
            }
          }
        }
      }
    }
  }
  CHECK(programs > 8000);
}

namespace {

PlanSetup with_order_of_torch(PlanSetup setup) {
  setup.model = odd_model();  // what is frozen is left out: it is still there from the step before
  setup.model.units.erase(setup.model.units.begin() + 2);
  setup.model.units[1].tensors.erase(setup.model.units[1].tensors.begin() + 1);
  setup.schedule = {.gathered_bytes = SIZE_MAX};
  setup.micro_steps = 2;
  setup.trace = order_in_torch(setup.model);
  return setup;
}

// A lone rank sums large units in parts.
PlanSetup in_parts(std::size_t micro_steps, GradientFormat format) {
  PlanSetup setup{.model = plain_model(2, 4000),
                  .placement = placement_of_stage(3, 1),
                  .micro_steps = micro_steps,
                  .gradient_format = format};
  setup.placement.gradients = setup.placement.state = host;
  return setup;
}

PlanSetup updated_late(PlanSetup setup) {
  setup.schedule.most_repeats = 0;
  return setup;
}

// Parameters and gradients pass between ranks through the host's memory.
PlanSetup through_the_host(const Model& model) {
  PlanSetup setup{.model = model, .placement = placement_of_stage(3, 2), .shares_memory = true};
  setup.rates = {.upload = 1, .download = 1, .host_memory = 3, .peers = 0.1, .shared = 1};
  setup.placement.parameters = setup.placement.gradients = setup.placement.state = host;
  return setup;
}

// Returns characteristic programs, small enough to break every operation.
std::vector<PlanSetup> samples() {
  PlanSetup nvme_state{.model = odd_model(), .placement = placement_of_stage(3, 2), .micro_steps = 2};
  nvme_state.placement.state = nvme;
  nvme_state.schedule = {.staging_slots = 3, .kept_records = 1};
  PlanSetup on_host{.model = plain_model(3), .placement = placement_of_stage(3, 2)};
  on_host.placement = {2, 2, false, Reduction::each, host, host, host};
  PlanSetup on_both = on_host;
  on_both.rates = {1, 1, 2};
  PlanSetup visiting{.model = plain_model(2, 1000), .placement = placement_of_stage(2, 1), .rates = {1, 1, 2.4}};
  visiting.placement.state = host;
  PlanSetup full{.model = plain_model(2), .placement = placement_of_stage(1, 3)};
  full.placement.reduction = Reduction::boundary;
  PlanSetup in_backward{.model = plain_model(3), .placement = placement_of_stage(3, 2)};
  in_backward.placement.parameters = in_backward.placement.state = nvme;
  in_backward.schedule.update_in_backward = true;
  PlanSetup full_records = nvme_state;
  full_records.full_records = true;
  PlanSetup on_cpu = nvme_state;
  on_cpu.host_is_device = true;
  PlanSetup exact_uses{.model = plain_model(2), .placement = placement_of_stage(3, 2)};
  exact_uses.wire.gather = WireFormat::int8;
  exact_uses.trace = {{.unit = 0, .exact = true}, {0}, {1}, {.unit = 1, .exact = true}, {1, Phase::backward},
                      {0, Phase::backward}};
  PlanSetup copies{.model = odd_model(), .placement = placement_of_stage(3, 4), .rank = 1};
  copies.placement.parameter_replicas = 2;
  PlanSetup muon = with_muon(nvme_state);
  muon.model = matrix_model();
  PlanSetup muon_in_backward = with_muon(in_backward);
  muon_in_backward.model = matrix_model();
  muon_in_backward.model.units[0].tensors.erase(muon_in_backward.model.units[0].tensors.begin() + 1);  // the frozen one
  muon_in_backward.model.units.back().ties.clear();
  PlanSetup muon_alone{.model = matrix_model(), .placement = placement_of_stage(0, 1)};
  muon_alone.placement.state = host;
  PlanSetup muon_visiting = muon_alone;
  muon_visiting.rates = {1, 1, 1e-3};
  return {nvme_state,
          on_host,
          full,
          in_backward,
          full_records,
          updated_late(full_records),
          on_cpu,
          copies,
          muon,
          muon_in_backward,
          with_muon(muon_alone),
          on_both,
          through_the_host(odd_model()),
          visiting,
          with_muon(muon_visiting),
          in_parts(1, GradientFormat::fp32),
          in_parts(2, GradientFormat::fp32),
          in_parts(2, GradientFormat::bf16),
          with_order_of_torch(in_backward),
          exact_uses};
}

}  // namespace

TEST_CASE("no operation is superfluous: without any one of them, the verifier finds a fault") {
  for (const PlanSetup& setup : samples()) {
    const CompiledPlan plan = plan_of(setup);
    for (std::size_t i = 0; i < plan.program().ops.size(); ++i) {
      INFO("without " << name(plan.program().ops[i].kind) << ", operation " << i);
      CHECK_FALSE(verify(plan.input(), without(plan.program(), i)).empty());
    }
  }
}

TEST_CASE("waits are needed: without one of them, two operations use the same bytes at once") {
  for (const PlanSetup& setup : samples()) {
    const CompiledPlan plan = plan_of(setup);
    std::size_t needed = 0;
    std::size_t all = 0;
    for (std::size_t i = 0; i < plan.program().ops.size(); ++i) {
      for (std::size_t wait = 0; wait < plan.program().ops[i].after.size(); ++wait) {
        Program broken = plan.program();
        broken.ops[i].after.erase(broken.ops[i].after.begin() + static_cast<std::ptrdiff_t>(wait));
        if (!verify(plan.input(), broken).empty()) ++needed;
        ++all;
      }
    }
    CHECK(needed > all / 3);  // the others are implied by what the awaited ones waited for
  }
}

TEST_CASE("the verifier names the fault") {
  const CompiledPlan plan = plan_of(samples()[1]);
  const auto problem_with = [&](OpKind kind, const auto& change) {
    Program broken = plan.program();
    change(*std::ranges::find(broken.ops, kind, &Op::kind));
    const auto problems = verify(plan.input(), broken);
    return problems.empty() ? std::string("nothing") : problems.front();
  };
  using Catch::Contains;
  CHECK_THAT(problem_with(OpKind::use, [](Op& op) { op.after.clear(); }), Contains("does not wait for"));
  CHECK_THAT(problem_with(OpKind::use,
                          [](Op& op) {
                            op.after = {{90, false}};
                          }),
             Contains("waits for a later operation"));
  CHECK_THAT(problem_with(OpKind::use, [](Op& op) { op.unit = 1; }), Contains("not the next visit of the trace"));
  CHECK_THAT(problem_with(OpKind::update, [](Op& op) { op.tile = 1; }),
             Contains("tile 1, which the model does not have"));
}

TEST_CASE("a sum that takes the norm of tensors that another rank counts, or of a part of a step, is a fault") {
  PlanSetup setup{.model = plain_model(3), .placement = placement_of_stage(0, 1), .micro_steps = 2};
  const auto problem_with = [&](const auto& change) {
    const CompiledPlan plan = plan_of(setup);
    REQUIRE(verify(plan.input(), plan.program()).empty());
    Program broken = plan.program();
    change(broken);
    const auto problems = verify(plan.input(), broken);
    return problems.empty() ? std::string("nothing") : problems.front();
  };
  const auto take_norm = [](Program& program, OpKind kind) {
    const auto norm = std::ranges::find(program.slots, SlotRole::norm, &Slot::role);
    std::ranges::find(program.ops, kind, &Op::kind)->state = {static_cast<std::size_t>(norm - program.slots.begin()), 0,
                                                              norm->bytes};
  };
  using Catch::Contains;
  CHECK_THAT(problem_with([](Program& program) { std::ranges::find_if(program.ops, takes_norm)->state = {}; }),
             Contains("0 elements of unit 2 are in the norm"));
  CHECK_THAT(problem_with([&](Program& program) { take_norm(program, OpKind::reduce); }), Contains("needs a norm of"));
  setup.model.units[2].tensors.front().counted = false;
  CHECK_THAT(problem_with([&](Program& program) { take_norm(program, OpKind::accumulate); }),
             Contains("tensors that another rank counts"));
}

TEST_CASE("a gather that is encoded for an exact use, or exact for another, is a fault") {
  const CompiledPlan plan = plan_of(samples().back());
  const std::vector<Op>& ops = plan.program().ops;
  const Codes codes = std::ranges::find_if(ops, [](const Op& op) { return op.codes.exist(); })->codes;
  std::size_t exact = 0;
  for (std::size_t i = 0; i < ops.size(); ++i) {
    if (ops[i].kind != OpKind::gather) continue;
    Program broken = plan.program();
    if (!ops[i].codes.exist()) ++exact;
    broken.ops[i].codes = ops[i].codes.exist() ? Codes{} : codes;
    const auto problems = verify(plan.input(), broken);
    REQUIRE_FALSE(problems.empty());
    CHECK_THAT(problems.back(), Catch::Contains("needs parameters"));
  }
  CHECK(exact == 2);
}

TEST_CASE("parameters are not read before they are written") {
  PlanSetup setup = samples()[3];
  setup.schedule.update_in_backward = false;
  const CompiledPlan plan = plan_of(setup);
  Program broken = plan.program();
  Op& fetch = *std::ranges::find(broken.ops, OpKind::read_first, &Op::kind);
  CHECK(std::erase_if(fetch.after, [&](const Wait& wait) { return broken.ops[wait.op].kind == OpKind::write; }) == 1);
  const auto problems = verify(plan.input(), broken);
  REQUIRE_FALSE(problems.empty());
  CHECK_THAT(problems.front(), Catch::Contains("read_first") && Catch::Contains("write"));
}

TEST_CASE("no rank overwrites records that another may still need to resume from") {
  const CompiledPlan plan = plan_of(samples()[0]);
  const auto commit = std::ranges::find(plan.program().ops, OpKind::commit, &Op::kind);
  Program broken = plan.program();
  Op& agreement = *std::ranges::find(broken.ops, OpKind::agree, &Op::kind);
  CHECK(std::erase(agreement.after, Wait{static_cast<std::uint32_t>(commit - plan.program().ops.begin()), true}) == 1);
  const auto problems = verify(plan.input(), broken);
  REQUIRE_FALSE(problems.empty());
  CHECK_THAT(problems.front(), Catch::Contains("may come before another rank's commit"));
}
