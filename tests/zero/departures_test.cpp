// Trainers that leave the program's order: with the bits of programs that were made for what they do.
#include <catch2/catch.hpp>
#include <thread>

#include "tests/temporary_directory.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

using Rounds = std::vector<std::vector<Trace>>;

constexpr Visit forward(std::size_t unit) { return {unit, Phase::forward}; }
constexpr Visit backward(std::size_t unit) { return {unit, Phase::backward}; }

// Of odd_model(): 5 is tied to 0, 2 is frozen, 3 is empty.
const Trace unused{forward(0), forward(1), forward(5), backward(5), backward(0)};  // 4 never, 1 not backward
const Trace shared{forward(0),  forward(1),  forward(4),  forward(1),  forward(5),
                   backward(5), backward(1), backward(4), backward(1), backward(0)};
const Trace another{forward(4), forward(1), forward(0), forward(5), backward(1), backward(5), backward(0), backward(4)};
const Trace recomputed{forward(0),  forward(1), forward(4),  forward(5), backward(5), forward(4),
                       backward(4), forward(1), backward(1), forward(0), backward(0)};
const Trace in_parts{forward(0), forward(5),  backward(5), forward(1),
                     forward(4), backward(4), backward(1), backward(0)};
const Trace no_backward{forward(0), forward(1), forward(2), forward(3), forward(4), forward(5)};

const std::map<std::string, Trace> orders{{"unused", unused},     {"shared", shared},
                                          {"another", another},   {"recomputed", recomputed},
                                          {"in parts", in_parts}, {"no backward", no_backward}};

// The visits of a round's uses, as a program's trace.
Trace trace_of_round(const std::vector<Trace>& round) {
  Trace trace;
  for (const Trace& uses : round) {
    for (const Visit& use : uses) {
      const Trace visits = visits_of(odd_model(), use.unit, use.phase);
      trace.insert(trace.end(), visits.begin(), visits.end());
    }
  }
  return trace;
}

// Whole rounds at stage 0, each by a program that was made for it. One micro-step of them all, and so scaled.
Setup planned_for(const std::vector<Trace>& round, const Setup& departing) {
  Setup setup = departing;
  setup.placement = placement_of_stage(0, departing.placement.shards * departing.placement.replicas);
  setup.placement.reduction = departing.placement.reduction;
  setup.schedule = {};
  setup.trace = trace_of_round(round);
  setup.loss_scale = static_cast<double>(departing.micro_steps);
  setup.micro_steps = 1;
  return setup;
}

std::vector<std::size_t> on_demand(const std::vector<Outcome>& outcomes) {
  for (const Outcome& outcome : outcomes)
    CHECK(outcome.on_demand == outcomes[0].on_demand);
  return outcomes[0].on_demand;
}

void check_everywhere(const Setup& with, const std::vector<std::size_t>& served) {
  const std::vector<Outcome> expected = train(planned_for(with.rounds[0], with));
  CHECK(on_demand(expected) == std::vector<std::size_t>(with.steps, 0));
  for (Placement placement : placements(with.placement.shards)) {
    placement.reduction = with.placement.reduction;
    CAPTURE(placement.shards, placement.whole_parameters, placement.parameters.fractions(),
            placement.gradients.fractions(), placement.state.fractions());
    Setup setup = with;
    setup.placement = placement;
    const std::vector<Outcome> outcomes = train(setup);
    check_same(expected, outcomes);
    CHECK(on_demand(outcomes) == served);
    for (const Outcome& outcome : outcomes)
      CHECK(outcome.reserved_bytes == outcome.planned_bytes);
  }
}

}  // namespace

TEST_CASE("an order that comes again is served on demand twice, and then compiled: same bits", "[departures]") {
  for (const auto& [name, uses] : orders) {
    for (const std::size_t ranks : {1u, 2u}) {
      for (const Reduction reduction : {Reduction::each, Reduction::boundary}) {
        for (const std::size_t micro_steps : {1u, 3u}) {
          CAPTURE(name, ranks, static_cast<int>(reduction), micro_steps);
          Placement placement = placement_of_stage(0, ranks);
          std::swap(placement.shards, placement.replicas);
          placement.reduction = reduction;
          check_everywhere({.placement = placement,
                            .micro_steps = micro_steps,
                            .schedule = {.prefetch = 2, .staging_slots = 3, .kept_records = 2},
                            .max_norm = 0.05,
                            .rounds = {std::vector<Trace>(micro_steps, uses)}},
                           {1, 1, 0, 0});
        }
      }
    }
  }
}
