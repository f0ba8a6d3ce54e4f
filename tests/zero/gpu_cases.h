// What a GPU's lanes have to do, on a GPU and on an emulated one.
#pragma once

#include <catch2/catch.hpp>

#include "tests/zero/training_rig.h"

namespace ballast::testing {

// Units in another order, left out, or used twice; then an order that comes again.
inline std::vector<std::vector<Trace>> rounds_that_depart() {
  constexpr auto f = Phase::forward, b = Phase::backward;
  const Trace mixed{{0, f}, {2, f}, {1, f}, {1, f}, {5, f}, {5, b}, {1, b}, {1, b}};
  const Trace plain{{5, f}, {1, f}, {4, f}, {4, b}, {5, b}};
  return {{mixed, plain}, {plain, mixed}, {plain}, {plain}, {plain}};
}

inline void check_gpu_trains_as_cpu(std::size_t ranks, const Setup& with = {}) {
  Setup on_cpu = with;
  on_cpu.placement = placement_of_stage(0, ranks);
  const std::vector<Outcome> expected = train(on_cpu);
  for (const Placement& placement : placements(ranks)) {
    CAPTURE(ranks, placement.shards, placement.whole_parameters, placement.parameters.fractions(),
            placement.gradients.fractions(), placement.state.fractions());
    Setup setup = with;
    setup.placement = placement;
    setup.gpu = true;
    const std::vector<Outcome> outcomes = train(setup);
    check_same(expected, outcomes);
    if (with.rounds.empty()) check_as_planned(outcomes);
  }
}

inline void check_gpu_trains_as_cpu() {
  for (const std::size_t ranks : {1u, 2u}) {
    check_gpu_trains_as_cpu(ranks, {.micro_steps = 2, .max_norm = 0.05});
    check_gpu_trains_as_cpu(ranks, {.schedule = {.prefetch = 2, .kept_records = 2, .update_in_backward = true}});
    check_gpu_trains_as_cpu(ranks, {.poisoned_step = 1});
    check_gpu_trains_as_cpu(ranks, {.rounds = rounds_that_depart()});
    check_gpu_trains_as_cpu(ranks, {.micro_steps = 2, .schedule = {.kept_records = 2}, .rounds = rounds_that_depart()});
  }
}

inline void check_gpu_trains_in_all_formats() {
  for (const auto format : kernels::all_state_formats) {
    CAPTURE(name(format));
    check_gpu_trains_as_cpu(2, {.format = format});
  }
}

}  // namespace ballast::testing
