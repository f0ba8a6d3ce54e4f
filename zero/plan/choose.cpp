#include "zero/plan/choose.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/runtime/error.h"
#include "kernels/runtime/sizes.h"

namespace ballast {
namespace {

std::size_t index(Tier tier) { return static_cast<std::size_t>(tier); }

// What a placement is compiled from.
struct Candidate {
  Candidate(const ChoiceInput& input, const Placement& placement)
      : layout(make_layout(input.model, placement.shards, input.tile_elements)),
        blocks(input.model, layout, placement,
               {.format = input.format, .names = input.names, .whole_records = input.whole_records}),
        compile_input{.model = input.model,
                      .layout = layout,
                      .blocks = blocks,
                      .placement = placement,
                      .micro_steps = input.micro_steps,
                      .trace = input.trace,
                      .schedule = input.schedule,
                      .host_is_device = input.machine.host_is_device} {}

  Ledger ledger(const Program& program) const { return ledger_of(program, blocks.records()); }

  Layout layout;
  Blocks blocks;
  CompileInput compile_input;
};

// Bytes over the budgets, of all tiers.
std::size_t shortage(const Ledger& ledger, const Machine& machine) {
  std::size_t bytes = 0;
  const TierBytes needed = needs(ledger, machine);
  for (std::size_t i = 0; i < tier_count; ++i) {
    bytes += needed[i] - std::min(needed[i], machine.bytes[i]);
  }
  return bytes;
}

bool is_a_choice(Tier tier, const Machine& machine) {
  if (tier == Tier::device) return true;
  return machine.bytes[index(tier)] > 0 && !(tier == Tier::host && machine.host_is_device);
}

Spread mixed(Tier near, Tier far, double part_near) {
  std::array<double, tier_count> fractions{};
  fractions[index(near)] = part_near;
  fractions[index(far)] += 1.0 - part_near;
  return {fractions[0], fractions[1], fractions[2]};
}

// Moves as much of the state as fits from where it lies to a nearer tier. Memory grows in proportion, so one guess and a
// few smaller ones do.
std::optional<Choice> with_nearer_state(const ChoiceInput& input, const Placement& far, const Ledger& far_ledger,
                                        Tier near) {
  constexpr int guesses = 4;
  const Tier from = far.state.nvme == 1.0 ? Tier::nvme : Tier::host;
  Placement placement = far;
  placement.state = all_in(near);
  if (near == Tier::device) placement.gradients = all_in(Tier::device);
  const std::size_t all_near = needs(memory_of(input, placement), input.machine)[index(near)];
  const std::size_t now = needs(far_ledger, input.machine)[index(near)];
  const std::size_t budget = input.machine.bytes[index(near)];
  if (now > budget || all_near <= now) return {};
  double part = static_cast<double>(budget - now) / static_cast<double>(all_near - now);
  part = std::min(part, 1.0);
  for (int guess = 0; guess < guesses && part > 0.01; ++guess, part *= 0.9) {
    placement.state = mixed(near, from, part);
    if (fits(memory_of(input, placement), input.machine)) return price(input, placement);
  }
  return {};
}

struct Search {
  std::optional<Choice> best{};
  std::optional<Ledger> closest{};  // of what does not fit
};

void consider(Search& search, const Choice& choice) {
  if (!search.best || choice.simulation.seconds < search.best->simulation.seconds) search.best = choice;
}

void consider_nearer_state(Search& search, const ChoiceInput& input, const Placement& far, const Ledger& ledger) {
  for (const Tier near : {Tier::device, Tier::host}) {
    const bool nearer = far.state.fractions()[index(near)] == 0.0 && (near == Tier::device || far.state.nvme > 0.0);
    const bool below_parameters = near == Tier::device && far.parameters.device < 1.0;
    if (!nearer || below_parameters || !is_a_choice(near, input.machine)) continue;
    if (const auto better = with_nearer_state(input, far, ledger, near)) consider(search, *better);
  }
}

// Of the placements whose state lies in one tier, and of those that move a part of it to a nearer tier. Where none of the
// former fits, two tiers together may still hold what neither holds alone.
Search search(const ChoiceInput& input) {
  Search result;
  std::vector<std::pair<Placement, Ledger>> too_large;
  for (const Placement& placement : pure_placements(input)) {
    const Ledger ledger = memory_of(input, placement);
    if (fits(ledger, input.machine)) {
      const Choice choice = price(input, placement);
      consider(result, choice);
      consider_nearer_state(result, input, placement, choice.ledger);
    } else {
      const auto lacks = [&](const Ledger& l) { return shortage(l, input.machine); };
      if (!result.closest || lacks(ledger) < lacks(*result.closest)) result.closest = ledger;
      too_large.emplace_back(placement, ledger);
    }
  }
  if (result.best) return result;
  for (const auto& [placement, ledger] : too_large) {
    consider_nearer_state(result, input, placement, ledger);
  }
  return result;
}

[[noreturn]] void fail_to_fit(const ChoiceInput& input, const Ledger& closest) {
  std::string needed;
  std::string available;
  const TierBytes all_needed = needs(closest, input.machine);
  for (std::size_t i = 0; i < tier_count; ++i) {
    const Tier tier = static_cast<Tier>(i);
    const auto separator = i == 0 ? "" : ", ";
    needed += fmt::format("{}{} {}", separator, name(tier), human_bytes(all_needed[i]));
    available += fmt::format("{}{} {}", separator, name(tier), human_bytes(input.machine.bytes[i]));
  }
  fail(Code::memory_budget,
       {.what = "no placement fits; the one that comes closest needs\n" + to_text(closest),
        .needed = needed,
        .available = available,
        .remedy = "Plan with a smaller state format, updates in the backward pass, or more memory, drives or ranks."});
}

}  // namespace

TierBytes needs(const Ledger& ledger, const Machine& machine) {
  TierBytes bytes = bytes_by_tier(ledger);
  if (machine.host_is_device) bytes[index(Tier::device)] += std::exchange(bytes[index(Tier::host)], 0);
  return bytes;
}

std::vector<Placement> pure_placements(const ChoiceInput& input) {
  std::vector<Placement> all;
  for (int stage = 0; stage <= 3; ++stage) {
    if (input.stage ? *input.stage != stage : (stage == 1 || (stage == 2 && input.ranks == 1))) continue;
    for (const Tier parameters : {Tier::device, Tier::host, Tier::nvme}) {
      if (stage < 3 && parameters != Tier::device) continue;
      for (const Tier state : {Tier::device, Tier::host, Tier::nvme}) {
        for (const Tier gradients : {Tier::device, Tier::host}) {
          if (state < parameters || state < gradients) continue;
          const std::array tiers{parameters, gradients, state};
          if (!std::ranges::all_of(tiers, [&](Tier tier) { return is_a_choice(tier, input.machine); })) continue;
          Placement placement = placement_of_stage(stage, input.ranks);
          placement.parameters = all_in(parameters);
          placement.gradients = all_in(gradients);
          placement.state = all_in(state);
          all.push_back(placement);
        }
      }
    }
  }
  return all;
}

Ledger memory_of(const ChoiceInput& input, const Placement& placement) {
  const Candidate candidate(input, placement);
  return candidate.ledger(outline(candidate.compile_input));
}

bool fits(const Ledger& ledger, const Machine& machine) { return shortage(ledger, machine) == 0; }

Choice price(const ChoiceInput& input, const Placement& placement) {
  const Candidate candidate(input, placement);
  const Program program = compile(candidate.compile_input);
  return {placement, candidate.ledger(program), simulate({program, placement, input.machine, input.work})};
}

Choice choose(const ChoiceInput& input) {
  const Search found = search(input);
  if (!found.best) fail_to_fit(input, *found.closest);
  return *found.best;
}

}  // namespace ballast
