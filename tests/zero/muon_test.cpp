// Tests of Muon in a training: its bits depend neither on the stage, the tiers and the tiles nor on which rank has a matrix.
#include <ballast/error.h>

#include <catch2/catch.hpp>

#include "kernels/orthogonalize.h"
#include "optim/step.h"
#include "tests/sanitizer.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

// Returns uses of matrix_model() that leave out a unit, use others twice or in another order; then an order that repeats.
std::vector<std::vector<Trace>> off_plan_uses() {
  constexpr auto f = Phase::forward, b = Phase::backward;
  const Trace mixed{{0, f}, {1, f}, {1, f}, {3, f}, {3, b}, {1, b}, {1, b}};
  const Trace plain{{3, f}, {0, f}, {0, b}, {3, b}};
  return {{mixed, plain}, {plain, mixed}, {plain}, {plain}, {plain}};
}

// A unit is left out, and those after it are updated in another order than the program's.
const Trace another_order{{0}, {1}, {3}, {1, Phase::backward}, {0, Phase::backward}};

// Takes a prime part of all combinations of placements, ranks and options, each of which has its turn.
class Part {
 public:
  explicit Part(std::size_t n) : distance_(n) {}
  bool takes_next() { return next_++ % distance_ == 0; }

 private:
  std::size_t distance_;
  std::size_t next_ = 0;
};

void check_tiers(Part& sweep, std::size_t ranks, const Setup& with) {
  Setup reference = with;
  reference.muon = true;
  reference.placement = placement_of_stage(0, ranks);
  std::vector<Outcome> expected;
  for (const Placement& placement : placements(ranks)) {
    if (!sweep.takes_next()) continue;
    if (expected.empty()) expected = train(reference);
    CAPTURE(ranks, placement.shards, placement.full_parameters, placement.parameters.fractions(),
            placement.gradients.fractions(), placement.state.fractions());
    Setup setup = reference;
    setup.placement = placement;
    const std::vector<Outcome> outcomes = train(setup);
    check_same(expected, outcomes);
    if (with.uses_by_step.empty() && !with.offloads && with.poisoned_step == none) check_as_planned(outcomes);
  }
}

void check_tiers(Part&& sweep) {
  const auto check = [&](std::size_t ranks, const Setup& setup) { check_tiers(sweep, ranks, setup); };
  for (const std::size_t ranks : {1u, 2u, 3u}) {
    check(ranks, {.tile_elements = 128, .micro_steps = 2, .max_norm = 0.05});
    check(ranks, {.tile_elements = 0, .schedule = {.prefetch = 2, .staging_slots = 1, .kept_records = 2}});
    check(ranks, {.schedule = {.kept_records = 1, .update_in_backward = true}});
    check(ranks, {.schedule = {.overlap_gathers = true}});
    check(ranks, {.poisoned_step = 1});
    check(ranks, {.micro_steps = 2, .gradient_format = GradientFormat::bf16, .keeps_run = true});
    check(ranks, {.uses_by_step = off_plan_uses()});
    check(ranks, {.schedule = {.kept_records = 1, .update_in_backward = true}, .uses_by_step = {{another_order}}});
    check(ranks, {.schedule = {.prefetch = 2, .kept_records = 2}, .offloads = true});
  }
}

std::string refused(const Model& model, const TrainingOptions& options) {
  try {
    const Plan plan(model, {0, 1}, {optim::Muon{}, optim::Muon{}}, options);
    const auto world = single_rank();
    const Training training(model, *world, {optim::Muon{}, optim::Muon{}}, options);
    return "nothing";
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

TEST_CASE("with Muon, stages, tiers, tiles, schedules and homes do not change a bit") {
  check_tiers(Part(sanitized ? 29 : 7));
}

TEST_CASE("with Muon on a GPU, stages, tiers and homes do not change a bit", "[gpu]") {
  const std::vector<Outcome> expected = train({.placement = placement_of_stage(0, 2), .muon = true, .gpu = 0});
  for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
    for (const double host_memory : {0.0, 2.0, 1e-3}) {  // the host updates what it keeps, or the GPU a part, or all
      if (tier != Tier::host && host_memory > 0.0) continue;
      CAPTURE(name(tier), host_memory);
      Placement placement = placement_of_stage(3, 2);
      placement.state = Spread(tier);
      const Setup setup{.placement = placement,
                        .muon = true,
                        .tile_elements = tier == Tier::host ? 128u : 256u,
                        .schedule = {.kept_records = 1, .update_in_backward = tier == Tier::nvme},
                        .rates = {.upload = 1, .download = 1, .host_memory = host_memory},
                        .gpu = 0};
      const std::vector<Outcome> outcomes = train(setup);
      check_same(expected, outcomes);
      check_as_planned(outcomes);
    }
  }
}

TEST_CASE("each format of Muon's momentum trains to the same bits in memory and on drives") {
  for (const auto format : all_state_formats) {
    CAPTURE(name(format));
    Placement on_drives = placement_of_stage(3, 2);
    on_drives.state = Tier::nvme;
    const Setup reference{.placement = placement_of_stage(0, 2), .muon = true, .format = format};
    Setup setup = reference;
    setup.placement = on_drives;
    check_same(train(reference), train(setup));
  }
}

TEST_CASE("Muon trains the same in groups of ranks that have a copy of the state, or of the parameters") {
  Placement mesh = placement_of_stage(3, 2);
  mesh.replicas = 2;
  Placement copies = placement_of_stage(3, 4);
  const std::vector<Outcome> expected =
      train({.placement = placement_of_stage(0, 4), .muon = true, .ranks_per_host = 2});
  copies.parameter_replicas = 2;
  for (Placement placement : {mesh, copies}) {
    for (const Tier tier : {Tier::device, Tier::host}) {
      placement.state = Spread(tier);
      const std::vector<Outcome> outcomes = train({.placement = placement, .muon = true});
      check_same(expected, outcomes);
      check_as_planned(outcomes);
    }
  }
}

// What the parts of the library do one after the other, on one rank and whole tensors.
TEST_CASE("a training with Muon does what its two updates and the orthogonalization say") {
  const Model model{{{.name = "h", .tensors = {{"qkv", {16, 32}, 0, false, true, {}, {8, 4, 4}}}}}};
  const optim::Muon rule{
      .lr = 0.1, .momentum = 0.5, .weight_decay = 0.25, .adjust_lr_fn = optim::AdjustLr::match_rms_adamw};
  const auto world = single_rank();
  Training training(model, *world, {rule}, {.stage = 0, .format = StateFormat::fp32, .threads = 1});
  training.initialize(initial_parameters());
  SyntheticTrainer trainer(model, 0);
  constexpr std::size_t count = 16 * 32;
  std::vector<float> master(count), momentum(count), gradient(count);
  {
    const Lease lease = training.forward(0);
    for (std::size_t i = 0; i < count; ++i)
      master[i] = value_of(lease[0], i);
  }
  const auto orthogonalizer = kernels::cpu_orthogonalizer({.threads = 1});
  for (std::size_t step = 0; step < 3; ++step) {
    { const Lease lease = training.forward(0); }
    {
      Lease lease = training.backward(0);
      for (std::size_t i = 0; i < count; ++i) {
        set_value(lease.gradient(0), i, noise(step * count + i));
        gradient[i] = value_of(lease.gradient(0), i);
      }
    }
    training.step();
    std::vector<bf16> direction(count);
    const View directions(reinterpret_cast<std::byte*>(direction.data()), count, DType::bf16);
    for (std::size_t i = 0; i < count; ++i) {
      momentum[i] = std::fma(0.5f, gradient[i] - momentum[i], momentum[i]);
      set_value(directions, i, std::fma(0.5f, momentum[i], 0.5f * gradient[i]));
    }
    std::size_t row = 0;
    for (const std::size_t rows : {8u, 4u, 4u}) {
      const kernels::MatrixShape shape{rows, 32};
      std::vector<std::byte> memory(orthogonalizer->workspace_bytes(shape) + kernels::workspace_alignment);
      void* aligned = memory.data();
      std::size_t space = memory.size();
      std::align(kernels::workspace_alignment, orthogonalizer->workspace_bytes(shape), aligned, space);
      const View block = directions.part(row * 32, rows * 32);
      (*orthogonalizer)(block, shape, optim::orthogonalization_of(rule),
                        View(static_cast<std::byte*>(aligned), orthogonalizer->workspace_bytes(shape), DType::u8));
      const float size = static_cast<float>(optim::adjusted_lr(rule, shape));
      for (std::size_t i = row * 32; i < (row + rows) * 32; ++i) {
        master[i] = std::fma(-size, value_of(directions, i), master[i] * static_cast<float>(1.0 - 0.1 * 0.25));
      }
      row += rows;
    }
    training.finish();
    const Lease lease = training.forward(0);
    for (std::size_t i = 0; i < count; ++i) {
      const float rounded = kernels::from_bf16(kernels::to_bf16(master[i]));
      if (value_of(lease[0], i) != rounded) FAIL("step " << step << ", element " << i);
    }
  }
}

TEST_CASE("Muon refuses what it cannot train, and a step that changes the kind of the rule") {
  CHECK_THAT(refused(matrix_model(), {}), Contains("nothing"));
  CHECK_THAT(refused(odd_model(), {}), Contains("B1005") && Contains("unit h.0, tensor w"));
  CHECK_THAT(refused(matrix_model(), {.verify = 1}), Contains("B1005") && Contains("verify updates of whole matrices"));
  const auto world = single_rank();
  Training training(matrix_model(), *world, {optim::Muon{}, optim::Muon{}}, {});
  training.initialize(initial_parameters());
  const std::vector<optim::Rule> others{optim::Lion{}, optim::Lion{}};
  CHECK_THROWS_WITH(training.step({.groups = others}), Contains("B1001") && Contains("needed:    Muon"));
}
