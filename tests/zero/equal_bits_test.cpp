// Tests that stages and tiers, which are only different programs, do not change the bits of a training.
#include <catch2/catch.hpp>

#include "tests/sanitizer.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

void check_schedule(const Schedule& schedule) {
  Sweep sweep(3);
  for (const std::size_t ranks : {1u, 3u}) {
    const std::vector<Outcome> expected = train({.placement = placement_of_stage(0, ranks)});
    for (const Placement& placement : placements(ranks)) {
      if (!sweep.takes_next()) continue;
      CAPTURE(ranks, placement.shards, placement.parameters.fractions(), placement.state.fractions());
      const std::vector<Outcome> outcomes = train({.placement = placement, .schedule = schedule});
      check_same(expected, outcomes);
      check_as_planned(outcomes);
    }
  }
}

}  // namespace

TEST_CASE("stages, tiers, tiles and schedules do not change a bit") {
  Sweep sweep(13);
  for (const std::size_t ranks : {1u, 2u, 3u, 5u}) {
    for (const std::size_t micro_steps : {1u, 3u}) {
      for (const double max_norm : {optim::no_clipping, 0.05}) {
        const Setup reference{
            .placement = placement_of_stage(0, ranks), .micro_steps = micro_steps, .max_norm = max_norm};
        const std::vector<Outcome> expected = train(reference);
        for (const Placement& placement : placements(ranks)) {
          for (const auto& [tile, schedule] :
               {std::pair{std::size_t{128}, Schedule{.prefetch = 0, .staging_slots = 1}},
                std::pair{std::size_t{100'096}, Schedule{.prefetch = 2, .staging_slots = 4, .kept_records = 2}},
                std::pair{std::size_t{0}, Schedule{.prefetch = 1, .staging_slots = 2}}}) {
            if (!sweep.takes_next()) continue;
            CAPTURE(ranks, micro_steps, max_norm, placement.shards, placement.full_parameters,
                    placement.parameters.fractions(), placement.gradients.fractions(), placement.state.fractions(),
                    tile);
            Setup setup = reference;
            setup.placement = placement;
            setup.tile_elements = tile;
            setup.schedule = schedule;
            setup.keeps_run = schedule.kept_records > 0;
            const std::vector<Outcome> outcomes = train(setup);
            check_same(expected, outcomes);
            check_as_planned(outcomes);
          }
        }
      }
    }
  }
}

TEST_CASE("tiles of different sizes in several tiers do not change a bit") {
  Sweep sweep(5);
  for (const auto format : {StateFormat::split, StateFormat::compact, StateFormat::four_bit}) {
    const Setup reference{.placement = placement_of_stage(0, 2),
                          .model_times = sanitized ? 500 : 2000,
                          .tile_elements = (sanitized ? 32 : 128) * 1024,
                          .format = format,
                          .steps = 3};
    std::vector<Outcome> expected;
    for (const Spread& state : {Spread{}, Spread{0.5, 0.25, 0.25}}) {
      if (!sweep.takes_next()) continue;
      if (expected.empty()) expected = train(reference);
      Setup setup = reference;
      setup.placement = placement_of_stage(3, 2);
      setup.placement.state = state;
      setup.tile_elements = 0;
      setup.verify = 1;
      const std::vector<Outcome> outcomes = train(setup);
      check_same(expected, outcomes);
      check_as_planned(outcomes);
    }
  }
}

TEST_CASE("many tiles that are summed and updated at once do not change a bit") {
  Sweep sweep(5);
  for (const std::size_t ranks : {1u, 2u}) {
    for (const GradientFormat format : {GradientFormat::fp32, GradientFormat::bf16}) {
      for (const std::size_t micro_steps : {1u, 2u}) {
        Setup setup{.placement = placement_of_stage(0, ranks),
                    .model_times = 6,
                    .micro_steps = micro_steps,
                    .gradient_format = format,
                    .max_norm = 0.05};
        const std::vector<Outcome> expected = train(setup);
        setup.tile_elements = 128;
        setup.verify = 1;
        for (const Placement& placement : placements(ranks)) {
          if (!sweep.takes_next()) continue;
          CAPTURE(ranks, micro_steps, name(format), placement.shards, placement.parameters.fractions(),
                  placement.gradients.fractions(), placement.state.fractions());
          setup.placement = placement;
          const std::vector<Outcome> outcomes = train(setup);
          check_same(expected, outcomes);
          check_as_planned(outcomes);
        }
      }
    }
  }
}

TEST_CASE("before the first step, more records may be read than fit into memory at once") {
  Placement on_drive = placement_of_stage(3, 1);
  on_drive.parameters = on_drive.state = Tier::nvme;
  const Setup setup{.placement = on_drive, .tile_elements = 128, .schedule = {.prefetch = 3}};
  check_same(train({.placement = placement_of_stage(0, 1)}), train(setup));
}

TEST_CASE("updating in the backward pass does not change a bit") { check_schedule({.update_in_backward = true}); }

TEST_CASE("gathering updated units in the order of the next forward does not change a bit") {
  check_schedule({.overlap_gathers = true});
}

TEST_CASE("keeping units gathered from forward to backward does not change a bit") {
  for (const std::size_t bytes : {std::size_t{20'000}, SIZE_MAX}) {
    check_schedule({.gathered_bytes = bytes});
    check_schedule({.prefetch = 2, .gathered_bytes = bytes, .update_in_backward = true});
  }
}

TEST_CASE("offloading between steps does not change a bit") {
  Sweep sweep(3);
  for (const std::size_t ranks : {1u, 2u}) {
    const std::vector<Outcome> expected = train({.placement = placement_of_stage(0, ranks), .micro_steps = 2});
    for (const Placement& placement : placements(ranks)) {
      if (!sweep.takes_next()) continue;
      CAPTURE(ranks, placement.shards, placement.parameters.fractions(), placement.state.fractions());
      check_same(expected, train({.placement = placement,
                                  .micro_steps = 2,
                                  .schedule = {.prefetch = 2, .kept_records = 2},
                                  .offloads = true}));
    }
  }
}

TEST_CASE("looking at the state between steps does not change a bit") {
  Placement placement = placement_of_stage(3, 2);
  placement.state = Tier::nvme;
  const std::vector<Outcome> expected = train({.placement = placement});
  for (const std::size_t kept_records : {std::size_t{2}, SIZE_MAX}) {
    for (const bool update_in_backward : {false, true}) {
      CAPTURE(kept_records, update_in_backward);
      check_same(expected, train({.placement = placement,
                                  .schedule = {.kept_records = kept_records, .update_in_backward = update_in_backward},
                                  .looks = true}));
    }
  }
}

TEST_CASE("other memory for gathered parameters between steps does not change a bit") {
  Sweep sweep(3);
  for (const std::size_t ranks : {1u, 2u}) {
    const std::vector<Outcome> expected = train({.placement = placement_of_stage(0, ranks), .micro_steps = 2});
    for (const Placement& placement : placements(ranks)) {
      if (!sweep.takes_next()) continue;
      CAPTURE(ranks, placement.shards, placement.parameters.fractions(), placement.state.fractions());
      check_same(expected,
                 train({.placement = placement, .micro_steps = 2, .schedule = {.kept_records = 2}, .regathers = true}));
    }
  }
}

TEST_CASE("a mesh of groups and replicas gives the same bits on every tier") {
  Placement mesh = placement_of_stage(3, 2);
  mesh.replicas = 2;
  const std::vector<Outcome> expected = train({.placement = mesh, .micro_steps = 2});
  CHECK((expected[0].parameters == expected[2].parameters));
  for (const Tier tier : {Tier::host, Tier::nvme}) {
    Placement placement = mesh;
    placement.state = Spread(tier);
    placement.gradients = Tier::host;
    check_same(expected, train({.placement = placement, .micro_steps = 2}));
  }
}

TEST_CASE("a copy of the parameters in each host gives the bits of one that all hosts share, on every tier") {
  const Placement shared = placement_of_stage(3, 4);
  const std::vector<Outcome> expected = train({.placement = shared, .micro_steps = 2, .ranks_per_host = 2});
  for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
    CAPTURE(name(tier));
    Placement copies = shared;
    copies.parameter_replicas = 2;
    copies.state = Spread(tier);
    copies.gradients = all_in(std::min(tier, Tier::host));
    const std::vector<Outcome> outcomes = train({.placement = copies, .micro_steps = 2});
    check_same(expected, outcomes);
    check_as_planned(outcomes);
    check_same(
        expected,
        train(
            {.placement = copies, .micro_steps = 2, .schedule = {.prefetch = 2, .kept_records = 2}, .offloads = true}));
  }
}

TEST_CASE("copies of the parameters get each update in the backward pass, and off plan") {
  const auto f = Phase::forward, b = Phase::backward;
  Placement copies = placement_of_stage(3, 4);
  copies.parameter_replicas = 2;
  check_same(train({.placement = placement_of_stage(3, 4), .ranks_per_host = 2}),
             train({.placement = copies, .schedule = {.update_in_backward = true}}));
  const std::vector<std::vector<Trace>> another{{{{1, f}, {0, f}, {4, f}, {4, b}, {1, b}, {0, b}}}};
  check_same(train({.placement = placement_of_stage(3, 4), .ranks_per_host = 2, .uses_by_step = another}),
             train({.placement = copies, .uses_by_step = another}));
}

TEST_CASE("each format trains to the same bits in memory and on drives, and split to those of fp32") {
  for (const auto format : all_state_formats) {
    Placement on_drives = placement_of_stage(3, 2);
    on_drives.state = Tier::nvme;
    const std::vector<Outcome> expected = train({.placement = placement_of_stage(0, 2), .format = format});
    for (const bool keeps_run : {false, true}) {
      CAPTURE(name(format), keeps_run);
      check_same(expected,
                 train({.placement = on_drives, .tile_elements = 384, .format = format, .keeps_run = keeps_run}));
    }
  }
  check_same(train({.placement = placement_of_stage(0, 2), .format = StateFormat::fp32}),
             train({.placement = placement_of_stage(0, 2), .format = StateFormat::split}));
}

TEST_CASE("reducing at the boundary gives the same bits at every stage") {
  const auto with_boundary = [](Placement placement) {
    placement.reduction = Reduction::boundary;
    return placement;
  };
  const auto expected = train({.placement = with_boundary(placement_of_stage(0, 3)), .micro_steps = 3});
  for (const Placement& placement : placements(3)) {
    check_same(expected, train({.placement = with_boundary(placement), .micro_steps = 3}));
  }
}

TEST_CASE("a step whose gradients are not finite is skipped on all ranks, and names the parameter") {
  for (const Placement& placement : placements(2)) {
    CAPTURE(placement.shards, placement.parameters.fractions(), placement.state.fractions());
    const std::vector<Outcome> outcomes = train({.placement = placement, .poisoned_step = 1});
    check_same(train({.placement = placement_of_stage(0, 2), .poisoned_step = 1}), outcomes);
    for (const Outcome& outcome : outcomes) {
      CHECK(outcome.steps == 3);
      CHECK(outcome.reasons[1] == "the gradients are not finite, first in w (unit h.0)");
      CHECK(outcome.reasons[2].empty());
    }
  }
}
