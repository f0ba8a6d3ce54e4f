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
  std::optional<int> stage{};  // none: it is chosen too
  kernels::StateFormat format = kernels::StateFormat::split;
  optim::StateNames names{};
  std::size_t tile_elements = std::size_t{256} << 10;
  std::size_t micro_steps = 1;
  Schedule schedule{};
  Trace trace{};              // of each micro-step; empty: the order of declaration
  bool full_records = false;  // records hold parameters too
};

struct Choice {
  Placement placement{};
  Ledger ledger{};
  Simulation simulation{};
};

// The bytes that a placement takes of a machine, by tier.
TierBytes needs(const Ledger& ledger, const Machine& machine);

// The placements with every kind of state in one tier, near ones first. The choice may also be a mixture of two of
// them.
std::vector<Placement> pure_placements(const ChoiceInput& input);

// The memory of a placement. Cheaper than price(), because nothing is compiled or simulated.
Ledger memory_of(const ChoiceInput& input, const Placement& placement);

// The memory and the time of a placement. Throws if it cannot be compiled.
Choice price(const ChoiceInput& input, const Placement& placement);

bool fits(const Ledger& ledger, const Machine& machine);

// Throws B2004 if nothing fits, with a table of the memory that is missing. Tries no other input, because only the
// caller knows how the machine's bytes depend on it.
Choice choose(const ChoiceInput& input);

}  // namespace ballast
