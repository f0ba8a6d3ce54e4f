// What a GPU's lanes have to do, on a GPU and on an emulated one.
#pragma once

#include <catch2/catch.hpp>

#include "tests/zero/training_rig.h"

namespace ballast::testing {

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
    check_as_planned(outcomes);
  }
}

inline void check_gpu_trains_as_cpu() {
  for (const std::size_t ranks : {1u, 2u}) {
    check_gpu_trains_as_cpu(ranks, {.micro_steps = 2, .max_norm = 0.05});
    check_gpu_trains_as_cpu(ranks, {.schedule = {.prefetch = 2, .kept_records = 2, .update_in_backward = true}});
    check_gpu_trains_as_cpu(ranks, {.poisoned_step = 1});
  }
}

inline void check_gpu_trains_in_all_formats() {
  for (const auto format : kernels::all_state_formats) {
    CAPTURE(name(format));
    check_gpu_trains_as_cpu(2, {.format = format});
  }
}

}  // namespace ballast::testing
