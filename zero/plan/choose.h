// Chooses a placement: of those that fit a machine's budgets, the one whose step is predicted to take the least time.
#pragma once

#include <optional>

#include "zero/plan/compile.h"
#include "zero/plan/ledger.h"
#include "zero/plan/simulate.h"

namespace ballast {

struct ChoiceInput {
  const Model& model;
  Machine machine;
  std::span<const UnitWork> work;  // by unit
  std::size_t ranks = 1;
  std::optional<int> stage{};  // none: chosen too
  kernels::StateFormat format = kernels::StateFormat::split;
  optim::StateNames names{};
  std::size_t tile_elements = std::size_t{256} << 10;
  std::size_t micro_steps = 1;
  Schedule schedule{};
  Trace trace{};               // of each micro-step; empty: the order of declaration
  bool whole_records = false;  // a run goes on from its records alone
};

struct Choice {
  Placement placement{};
  Ledger ledger{};
  Simulation simulation{};
};

// How much of a machine's bytes a placement takes, by tier.
TierBytes needs(const Ledger& ledger, const Machine& machine);

// What there is to choose from: every kind of state in one tier, near ones first. The choice is also a mixture of those.
std::vector<Placement> pure_placements(const ChoiceInput& input);

// A placement's memory, without its time: a small part of the work.
Ledger memory_of(const ChoiceInput& input, const Placement& placement);

// A placement's price. Throws what cannot be compiled.
Choice price(const ChoiceInput& input, const Placement& placement);

bool fits(const Ledger& ledger, const Machine& machine);

// Throws B2004 where nothing fits, with a table of what is short. Tries no other input: what to change is for the caller,
// who knows how the machine's bytes depend on it.
Choice choose(const ChoiceInput& input);

}  // namespace ballast
