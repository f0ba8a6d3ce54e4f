// Tests of gradients that are kept in bf16: their bits are those of a definition by hand, and do not depend on the program.
#include <catch2/catch.hpp>
#include <cmath>
#include <mutex>

#include "kernels/random_math.h"
#include "tests/sanitizer.h"
#include "tests/zero/training_rig.h"
#include "zero/plan/program_cost.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

constexpr std::size_t elements = 300;
constexpr std::size_t micro_steps = 4;

std::uint32_t part_of(std::size_t rank, std::size_t micro_step, std::size_t element) {
  return kernels::to_bf16(noise((micro_step * 131 + rank) * 1'000'003 + element));
}

// The sum over the ranks in fp32, rounded once; each later one is added, and rounded up or down by a random number that
// belongs to the tensor, the element, the step and the sum's place in the step.
std::uint32_t kept_by_definition(std::size_t ranks, std::uint64_t tensor, std::uint64_t step, std::size_t element) {
  std::uint32_t kept = 0;
  for (std::size_t micro_step = 0; micro_step < micro_steps; ++micro_step) {
    float sum = 0.0f;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      sum += kernels::from_bf16(part_of(rank, micro_step, element));
    }
    const std::uint32_t rounded = kernels::to_bf16(sum);
    const std::uint64_t stream = kernels::rounding_stream(kernels::seed_of_gradients, micro_step, step);
    const std::uint32_t random = kernels::random_bits(
        static_cast<std::uint32_t>(element), kernels::rounding_key(kernels::stream_of_tensor(stream, tensor), element));
    const float both = kernels::from_bf16(kept) + kernels::from_bf16(rounded);
    kept = micro_step == 0 ? rounded : (kernels::bits(both) + (random & 0xffffu)) >> 16;
  }
  return kept;
}

void add_gradients(Training& training, std::size_t rank, std::size_t micro_step) {
  { const Lease forward = training.forward(0); }
  const Lease lease = training.backward(0);
  const std::span<bf16> gradient = lease.gradient(0).as<bf16>();
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    gradient[i].bits = static_cast<std::uint16_t>(part_of(rank, micro_step, i));
  }
}

// Takes two steps, and returns the gradients that the second one's own update gets.
void check_by_hand(int stage, std::size_t ranks) {
  constexpr std::uint64_t number = 41;
  std::vector<std::uint32_t> kept(elements);
  double squares = 0;
  for (std::size_t i = 0; i < elements; ++i) {
    const double value = kernels::from_bf16(kept_by_definition(ranks, number, 2, i));
    squares += value * value;
  }
  std::mutex mutex;
  const auto failures = failures_of_ranks(ranks, [&](Communicator& world) {
    Model model = plain_model(1, elements);
    model.units[0].tensors[0].number = number;
    Training training(model, world, {optim::External{}},
                      {.stage = stage,
                       .format = StateFormat::fp32,
                       .gradient_format = GradientFormat::bf16,
                       .micro_steps = micro_steps});
    training.initialize(initial_parameters());
    const std::vector<optim::Rule> rules{optim::External{}};
    double norm = 0;
    for (std::size_t step = 0; step < 2; ++step) {
      for (std::size_t micro_step = 0; micro_step < micro_steps; ++micro_step) {
        add_gradients(training, world.rank(), micro_step);
      }
      const auto look = [&](const TilesToUpdate& turn) {
        const std::lock_guard lock(mutex);
        for (const SummedTile& tile : turn.tiles) {
          const std::span<const bf16> gradients = ConstView(tile.gradients).as<bf16>();
          for (std::size_t i = 0; i < tile.range.count && tile.range.first + i < elements; ++i) {
            kept[tile.range.first + i] = gradients[i].bits;
          }
        }
      };
      norm = training.step({.groups = rules, .update = look}).norm;
    }
    const double by_hand = std::sqrt(squares) / static_cast<double>(ranks * micro_steps);
    if (std::abs(norm - by_hand) > 1e-12 * by_hand) throw std::logic_error("the norm is not that of what is kept");
  });
  CHECK(failures == std::vector<std::string>(ranks));
  for (std::size_t i = 0; i < elements; ++i) {
    if (kept[i] != kept_by_definition(ranks, number, 2, i)) FAIL("element " << i << " is " << kept[i]);
  }
}

// Trains two tensors in units that `model` makes of them, and returns their parameters by name.
using Parameters = std::map<std::string, std::vector<std::byte>>;

std::uint64_t seed_of(const Tensor& tensor) { return static_cast<std::uint64_t>(tensor.name.front()); }

void add_gradients_of(const Tensor& tensor, const View& gradient, std::size_t rank, std::size_t pass) {
  for (std::size_t i = 0; i < gradient.count(); ++i) {
    set_value(gradient, i, noise((pass * 17 + rank) * 1'000'003 + seed_of(tensor) * 7919 + i));
  }
}

Parameters trained_in(const Model& model, const TrainingOptions& options) {
  Parameters parameters;
  std::mutex mutex;
  const auto failures = failures_of_ranks(2, [&](Communicator& world) {
    Training training(model, world, {optim::AdamW{.lr = 0.02}}, options);
    training.initialize([&](std::size_t unit, std::size_t tensor, Range range, const View& to) {
      for (std::size_t i = 0; i < range.count; ++i)
        set_value(to, i, noise(seed_of(model.units[unit].tensors[tensor]) * 1009 + range.first + i));
    });
    for (std::size_t pass = 0; pass < 4 * options.micro_steps; ++pass) {
      for (const Visit& visit : plain_order(model)) {
        const Lease lease =
            visit.phase == Phase::forward ? training.forward(visit.unit) : training.backward(visit.unit);
        const std::vector<Tensor>& tensors = model.units[visit.unit].tensors;
        for (std::size_t i = 0; i < tensors.size() && visit.phase == Phase::backward; ++i)
          add_gradients_of(tensors[i], lease.gradient(i), world.rank(), pass);
      }
      if ((pass + 1) % options.micro_steps == 0) training.step();
    }
    const std::lock_guard lock(mutex);
    for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
      const Lease lease = training.forward(unit);
      for (std::size_t i = 0; i < model.units[unit].tensors.size(); ++i) {
        const auto bytes = lease[i].as_bytes();
        parameters[model.units[unit].tensors[i].name] = {bytes.begin(), bytes.end()};
      }
    }
  });
  CHECK(failures == std::vector<std::string>(2));
  return parameters;
}

}  // namespace

TEST_CASE("kept gradients and their norm are those of the definition, at every stage") {
  for (const int stage : {0, 2, 3}) {
    for (const std::size_t ranks : {1u, 3u}) {
      CAPTURE(stage, ranks);
      check_by_hand(stage, ranks);
    }
  }
}

TEST_CASE("gradients in bf16: stages, tiers, tiles and schedules do not change a bit") {
  Sweep sweep(11);
  for (const std::size_t ranks : {1u, 2u, 3u}) {
    for (const std::size_t passes : {1u, 3u}) {
      const Setup reference{.placement = placement_of_stage(0, ranks),
                            .micro_steps = passes,
                            .gradient_format = GradientFormat::bf16,
                            .max_norm = 0.05};
      const std::vector<Outcome> expected = train(reference);
      for (const Placement& placement : placements(ranks)) {
        for (const auto& [tile, schedule] :
             {std::pair{std::size_t{128}, Schedule{.prefetch = 0, .staging_slots = 1}},
              std::pair{std::size_t{0}, Schedule{.prefetch = 2, .staging_slots = 4, .kept_records = 2}}}) {
          if (!sweep.takes_next()) continue;
          CAPTURE(ranks, passes, placement.shards, placement.full_parameters, placement.parameters.fractions(),
                  placement.gradients.fractions(), placement.state.fractions(), tile);
          Setup setup = reference;
          setup.placement = placement;
          setup.tile_elements = tile;
          setup.schedule = schedule;
          const std::vector<Outcome> outcomes = train(setup);
          check_same(expected, outcomes);
          check_as_planned(outcomes);
        }
      }
    }
  }
}

TEST_CASE("gradients in bf16: updates in the backward pass, checks and offloading do not change a bit") {
  const auto gradient_format = GradientFormat::bf16;
  const std::vector<Outcome> expected =
      train({.placement = placement_of_stage(0, 2), .gradient_format = gradient_format});
  Sweep sweep(3);
  for (const Placement& placement : placements(2)) {
    if (!sweep.takes_next()) continue;
    CAPTURE(placement.shards, placement.parameters.fractions(), placement.state.fractions());
    check_same(
        expected,
        train({.placement = placement, .schedule = {.update_in_backward = true}, .gradient_format = gradient_format}));
    const std::vector<Outcome> checked =
        train({.placement = placement, .gradient_format = gradient_format, .verify = 1, .offloads = true});
    check_same(expected, checked);
    CHECK(checked[0].verified > 0);
  }
}

TEST_CASE("gradients in bf16: a mesh of groups and replicas gives the same bits on every tier") {
  Placement mesh = placement_of_stage(3, 2);
  mesh.replicas = 2;
  const Setup reference{.placement = mesh, .micro_steps = 3, .gradient_format = GradientFormat::bf16};
  const std::vector<Outcome> expected = train(reference);
  CHECK((expected[0].parameters == expected[2].parameters));
  for (const Tier tier : {Tier::host, Tier::nvme}) {
    Setup setup = reference;
    setup.placement.state = Spread(tier);
    setup.placement.gradients = Tier::host;
    const std::vector<Outcome> outcomes = train(setup);
    check_same(expected, outcomes);
    check_as_planned(outcomes);
  }
}

TEST_CASE("gradients in bf16 that are reduced at the boundary give the same bits at every stage") {
  const auto with_boundary = [](Placement placement) {
    placement.reduction = Reduction::boundary;
    return Setup{.placement = placement, .micro_steps = 3, .gradient_format = GradientFormat::bf16};
  };
  const auto expected = train(with_boundary(placement_of_stage(0, 3)));
  for (const Placement& placement : placements(3)) {
    check_same(expected, train(with_boundary(placement)));
  }
}

TEST_CASE("gradients in bf16 that are not finite skip the step, and name the parameter") {
  const std::vector<Outcome> outcomes = train({.placement = placement_of_stage(3, 2),
                                               .micro_steps = 2,
                                               .gradient_format = GradientFormat::bf16,
                                               .poisoned_step = 1});
  for (const Outcome& outcome : outcomes) {
    CHECK(outcome.steps == 3);
    CHECK(outcome.reasons[1] == "the gradients are not finite, first in w (unit h.0)");
  }
}

TEST_CASE("gradients in bf16 have other bits than those in fp32 where ranks or backward passes are summed") {
  const auto with = [](std::size_t ranks, std::size_t passes, GradientFormat format) {
    return train({.placement = placement_of_stage(2, ranks), .micro_steps = passes, .gradient_format = format})[0];
  };
  const auto fp32 = GradientFormat::fp32, bf16 = GradientFormat::bf16;
  CHECK((with(2, 1, fp32).parameters != with(2, 1, bf16).parameters));
  CHECK((with(1, 2, fp32).parameters != with(1, 2, bf16).parameters));
}

TEST_CASE("tensors with the same numbers round in the same way in other units") {
  const Tensor a{.name = "a", .shape = {700}, .number = 8}, b{.name = "b", .shape = {5, 111}, .number = 3};
  const Model together{{{.name = "both", .tensors = {a, b}}}};
  const Model apart{{{.name = "second", .tensors = {b}}, {.name = "first", .tensors = {a}}}};
  Model other = apart;
  other.units[1].tensors[0].number = 9;
  for (const auto format : all_state_formats) {
    for (const auto gradient_format : {GradientFormat::fp32, GradientFormat::bf16}) {
      CAPTURE(name(format), name(gradient_format));
      const auto options = [&](int stage) {
        return TrainingOptions{.stage = stage, .format = format, .gradient_format = gradient_format, .micro_steps = 3};
      };
      const Parameters expected = trained_in(together, options(2));
      CHECK(trained_in(apart, options(3)) == expected);
      const bool rounds_state = format != StateFormat::fp32 && format != StateFormat::split;
      const bool draws = gradient_format == GradientFormat::bf16 || rounds_state;
      CHECK((trained_in(other, options(3)) == expected) != draws);
    }
  }
}

TEST_CASE("gradients of bf16 parameters take 2 bytes where they are kept and moved, those of others 4") {
  const auto bytes_with = [](GradientFormat format, SlotRole role, DType dtype) {
    PlanSetup setup{.model = plain_model(1, 1024), .placement = placement_of_stage(3, 2), .micro_steps = 2};
    setup.model.units[0].dtype = dtype;
    setup.placement.gradients = setup.placement.state = Tier::host;
    setup.gradient_format = format;
    const CompiledPlan plan = plan_of(setup);
    for (const Slot& slot : plan.program().slots) {
      if (slot.role == role) return slot.bytes;
    }
    return std::size_t{0};
  };
  for (const SlotRole role : {SlotRole::reduced, SlotRole::arriving, SlotRole::landed}) {
    CAPTURE(name(role));
    CHECK(bytes_with(GradientFormat::fp32, role, DType::bf16) == 4 * 512);
    CHECK(bytes_with(GradientFormat::bf16, role, DType::bf16) == 2 * 512);
    CHECK(bytes_with(GradientFormat::bf16, role, DType::fp16) == 4 * 512);
    CHECK(bytes_with(GradientFormat::bf16, role, DType::fp32) == 4 * 512);
  }
}

TEST_CASE("downloads of gradients in bf16 move 2 bytes an element, wherever they are kept") {
  const auto downloads = [](GradientFormat format, Tier gradients) {
    PlanSetup setup{.model = plain_model(3, 1024), .placement = placement_of_stage(2, 2)};
    setup.placement.gradients = Spread(gradients);
    setup.placement.state = Tier::host;
    setup.gradient_format = format;
    const CompiledPlan plan = plan_of(setup);
    std::size_t bytes = 0;
    for (const Op& op : plan.program().ops) {
      if (op.lane == Lane::download && op.unit != none) bytes += bytes_moved(op, plan.placement());
    }
    return bytes;
  };
  // The parameter of each tile is downloaded too if gradients are on the device, at 2 bytes an element.
  const std::size_t parameters = downloads(GradientFormat::fp32, Tier::device) - 4 * 3 * 512;
  CHECK(downloads(GradientFormat::bf16, Tier::device) == 2 * 3 * 512 + parameters);
  const std::size_t on_host = downloads(GradientFormat::fp32, Tier::host) - 4 * 3 * 512;
  CHECK(downloads(GradientFormat::bf16, Tier::host) == 2 * 3 * 512 + on_host);
}

TEST_CASE("ranks that keep gradients in different formats are refused") {
  const auto failures = failures_of_ranks(2, [&](Communicator& world) {
    Training training(plain_model(1), world, {optim::AdamW{}},
                      {.stage = 2, .gradient_format = world.rank() == 0 ? GradientFormat::bf16 : GradientFormat::fp32});
    training.initialize(initial_parameters());
    add_gradients(training, world.rank(), 0);
    training.step();
  });
  for (const std::string& failure : failures)
    CHECK_THAT(failure, Catch::Contains("gradient_format is fp32 on rank 1, and bf16 on rank 0"));
}
