#include "zero/plan/choose.h"

#include <ballast/error.h>
#include <ballast/planner.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "kernels/runtime/sizes.h"
#include "zero/plan/compile.h"
#include "zero/plan/program_cost.h"
#include "zero/plan/simulate.h"

namespace ballast {
namespace {

constexpr double full_enough = 0.99;
constexpr double aimed_at = 0.995;
constexpr int interpolations = 4;  // where these fail, memory grows in large steps, and the interval is halved

struct Sample {
  double part;
  double fullness;
};

constexpr double finest_of_units = 1.0 / 128;
constexpr double finest_of_tiles = 1.0 / 256;

// Parameters, with their gradients and as much of their state, lie on the device or on the host; the rest of the state is
// on drives.
Placement filled(const ChoiceInput& input, double on_device, double in_memory) {
  Placement placement = placement_of_stage(3, input.ranks);
  placement.parameter_replicas = input.parameter_replicas;
  placement.parameters = {on_device, 1.0 - on_device, 0.0};
  placement.gradients = placement.parameters;
  placement.state = {in_memory, 0.0, 1.0 - in_memory};  // those of the host are no nearer than parameters
  return placement;
}

double part_on_device(const ChoiceInput& input, double in_memory) {
  if (input.parameter_replicas > 1) return 1.0;  // copies of parameters are on the device
  return round_fraction(greatest_part(finest_of_units, [&](double part) {
    return fullness(input, filled(input, part, in_memory), Tier::device, Tier::host);
  }));
}

std::size_t index(Tier tier) { return static_cast<std::size_t>(tier); }

// Returns the bytes over the budgets, summed over all tiers.
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
  return machine.bytes[index(tier)] > 0 && !(tier == Tier::host && machine.one_pool);
}

// Stage 1 has the programs of stage 2, and on one rank stage 2 has those of stage 0. Encoded gathers and replicas of
// parameters need stage 3, and parts of units a stage above 0.
bool is_a_choice(int stage, const ChoiceInput& input) {
  if (input.stage) return *input.stage == stage;
  if (stage == 0 && parts_of(input.model) > 1) return false;
  if (input.parameter_replicas > 1 || (input.ranks > 1 && input.wire.gather != WireFormat::exact)) return stage == 3;
  return stage != 1 && (stage != 2 || input.ranks > 1);
}

// Moves a part of what a tier has to a nearer one.
Spread moved(const Spread& spread, Tier from, Tier near, double part) {
  auto fractions = spread.fractions();
  const double present = fractions[index(from)];
  const double to_near = part == 1.0 ? present : round_fraction(part * present);
  fractions[index(near)] += to_near;
  fractions[index(from)] -= to_near;
  return {fractions[0], fractions[1], fractions[2]};
}

// Moves as much of the state, or of the gradients, as fits from its farthest tier to a nearer one. None if nothing of it fits there.
std::optional<Placement> with_nearer(Spread Placement::*what, const ChoiceInput& input, const Placement& far,
                                     Tier near) {
  constexpr double finest = 1.0 / 1024;
  const Spread& spread = far.*what;
  const Tier from = spread.nvme > 0.0 ? Tier::nvme : Tier::host;
  Placement placement = far;
  const auto fullness_with = [&](double part) {
    placement.*what = moved(spread, from, near, part);
    return fullness(input, placement, near, near == Tier::device ? Tier::host : Tier::nvme);
  };
  placement.*what = moved(spread, from, near, greatest_part(finest, fullness_with));
  if (placement.*what == spread) return {};
  return placement;
}

// Walks the placements whose parameters, gradients and state are each in one tier, those that fill all tiers, and for each of
// them those that move state to nearer tiers. With drives, it also walks all placements without drives; with more memory of
// the host, those with less. So neither slows the choice down, but for the grain of units and tiles.
class Search {
 public:
  explicit Search(const ChoiceInput& input) : input_(input) {}

  void run() {
    for (const Placement& placement : pure_placements(input_)) {
      consider(placement);
      consider_nearer_state(placement);
      consider_sums_on_device(placement);
      if (placement.parameters.host + placement.gradients.host + placement.state.host == 3.0)
        consider_parameters_on_device(placement);
    }
    ChoiceInput without_drives = input_;
    without_drives.machine.bytes[index(Tier::nvme)] = 0;
    consider_full_tiers(without_drives);  // first, so drives are not used where they save no time
    if (is_a_choice(Tier::nvme, input_.machine)) consider_full_tiers(input_);
  }

  const std::optional<Choice>& best() const { return best_; }
  const Ledger& closest() const { return *closest_; }  // the ledger of the closest placement that does not fit

 private:
  bool consider(const Placement& placement) {  // whether it fits
    if (std::ranges::find(considered_, placement) != considered_.end()) return true;
    considered_.push_back(placement);
    const Ledger ledger = memory_of(input_, placement);
    const bool fit = fits(ledger, input_.machine);
    if (fit) {
      const Choice choice = price(input_, placement);
      if (!best_ || choice.simulation.seconds < best_->simulation.seconds) best_ = choice;
    } else if (!closest_ || shortage(ledger, input_.machine) < shortage(*closest_, input_.machine)) {
      closest_ = ledger;
    }
    return fit;
  }

  std::optional<Placement> nearer(Spread Placement::*what, const Placement& placement, Tier near) const {
    return is_a_choice(near, input_.machine) ? with_nearer(what, input_, placement, near) : std::nullopt;
  }

  // Moves state from drives to the host. The device needs memory to update it in, and holds less of the state if that does not fit.
  void consider_state_on_host(const Placement& far) {
    const auto on_host = nearer(&Placement::state, far, Tier::host);
    if (!on_host || consider(*on_host)) return;
    Placement less_on_device = *on_host;
    less_on_device.state = {0.0, on_host->state.host, 1.0 - on_host->state.host};
    if (const auto on_both = nearer(&Placement::state, less_on_device, Tier::device)) consider(*on_both);
  }

  // Also of a placement that does not fit: two tiers together may hold what neither of them holds alone.
  void consider_nearer_state(const Placement& far) {
    const bool from_drives = far.state.nvme > 0.0;
    // Gradients of units with state on the device are there too, so placements with gradients on the host yield nothing new.
    if (far.parameters.device > 0.0 && far.gradients.device > 0.0 && far.state.device == 0.0) {
      if (const auto on_device = nearer(&Placement::state, far, Tier::device)) {
        consider(*on_device);
        if (from_drives) consider_state_on_host(*on_device);
      }
    }
    if (from_drives) consider_state_on_host(far);
  }

  // Parameters take the device's memory first: the device then copies least for an update. With some of them on the host, its
  // processor updates those while the links are busy, and gradients and state have room on the device.
  void consider_parameters_on_device(const Placement& on_host) {
    const auto near = nearer(&Placement::parameters, on_host, Tier::device);
    if (!near) return;
    Placement placement = on_host;
    const double most = near->parameters.device;
    const double least = 1.0 - greatest_part(finest_of_units, [&](double part) {
                           placement.parameters = {1.0 - part, part, 0.0};
                           return fullness(input_, placement, Tier::host, Tier::nvme);
                         });
    for (const double part : {1.0, 0.75, 0.5, 0.25, 0.0}) {
      const std::optional<Choice> before = best_;
      const double on_device = round_fraction(least + part * (most - least));
      placement.parameters = {on_device, 1.0 - on_device, 0.0};
      if (!consider(placement)) return;
      for (const auto what : {&Placement::gradients, &Placement::state}) {
        if (const auto nearest = nearer(what, placement, Tier::device)) consider(*nearest);
      }
      if (part < 1.0 && before->placement == best_->placement) return;
    }
  }

  // Sums of several micro-steps on the device pass to the host once a step.
  void consider_sums_on_device(const Placement& on_host) {
    if (input_.micro_steps == 1 || on_host.gradients.host == 0.0 || input_.machine.one_pool) return;
    if (const auto near = nearer(&Placement::gradients, on_host, Tier::device)) consider(*near);
  }

  void consider_full_tiers(const ChoiceInput& input) {
    const auto filled = fill_tiers(input);
    if (!filled) return;
    consider(*filled);
    consider_nearer_state(*filled);
    if (filled->parameters.device < 1.0) consider_nearer_state(with_one_more_unit(input, *filled));
  }

  const ChoiceInput& input_;
  std::vector<Placement> considered_{};
  std::optional<Choice> best_{};
  std::optional<Ledger> closest_{};
};

// After a few micro-steps each one takes the time and the bytes of those before; but for Schedule::layer_major, where other work hides
// behind all of a layer's.
constexpr std::size_t few_micro_steps = 16;
constexpr std::size_t some_micro_steps = 24;  // as many more as let memory that is used in turn come around

// Returns the step that has `times` as many micro-steps more than `some` has more than `few`.
Simulation extrapolated(const Simulation& few, const Simulation& some, double times) {
  Simulation step = some;
  each_figure(step, few, [&](auto& value, const auto& before) {
    const double more = times * (static_cast<double>(value) - static_cast<double>(before));
    value += static_cast<std::remove_reference_t<decltype(value)>>(more);
  });
  return step;
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

double fullness(const ChoiceInput& input, const Placement& placement, Tier first, Tier end) {
  const TierBytes needed = needs(memory_of(input, placement), input.machine);
  double fullest = 0.0;
  for (auto i = static_cast<std::size_t>(first); i < static_cast<std::size_t>(end); ++i) {
    const auto budget = static_cast<double>(std::max<std::size_t>(input.machine.bytes[i], 1));
    fullest = std::max(fullest, static_cast<double>(needed[i]) / budget);
  }
  return fullest;
}

double greatest_part(double finest, const std::function<double(double)>& fullness_with) {
  Sample fits{0.0, fullness_with(0.0)};
  if (fits.fullness > 1.0) return 0.0;
  Sample exceeds{1.0, fullness_with(1.0)};
  if (exceeds.fullness <= 1.0) return 1.0;
  for (int i = 0; fits.fullness < full_enough && exceeds.part - fits.part > finest; ++i) {
    const double interpolated = (aimed_at - fits.fullness) / (exceeds.fullness - fits.fullness);
    const double share = i < interpolations ? interpolated : 0.5;
    const double part = fits.part + share * (exceeds.part - fits.part);
    const Sample sample{part, fullness_with(part)};
    (sample.fullness <= 1.0 ? fits : exceeds) = sample;
  }
  return fits.part;
}

double round_fraction(double fraction) { return std::floor(fraction * 1e4) / 1e4; }

std::optional<Placement> fill_tiers(const ChoiceInput& input) {
  const auto& bytes = input.machine.bytes;
  if (input.stage.value_or(3) != 3 || input.machine.one_pool || bytes[1] == 0) return {};
  const double in_memory = bytes[2] == 0 ? 1.0 : round_fraction(greatest_part(finest_of_tiles, [&](double part) {
    return fullness(input, filled(input, part_on_device(input, part), part), Tier::host, Tier::nvme);
  }));
  return filled(input, part_on_device(input, in_memory), in_memory);
}

Placement with_one_more_unit(const ChoiceInput& input, const Placement& filled) {
  Placement placement = filled;
  const double more = 1.0 / static_cast<double>(input.model.units.size());
  const double on_device = std::min(1.0, round_fraction(filled.parameters.device + more));
  placement.parameters = placement.gradients = {on_device, 1.0 - on_device, 0.0};
  placement.state = Spread(input.machine.bytes[2] > 0 ? Tier::nvme : Tier::host);
  return placement;
}

TierBytes needs(const Ledger& ledger, const Machine& machine) {
  TierBytes bytes = bytes_by_tier(ledger);
  if (machine.one_pool) bytes[index(Tier::device)] += std::exchange(bytes[index(Tier::host)], 0);
  return bytes;
}

std::vector<Placement> pure_placements(const ChoiceInput& input) {
  std::vector<Placement> all;
  for (int stage = 0; stage <= 3; ++stage) {
    if (!is_a_choice(stage, input)) continue;
    for (const Tier parameters : {Tier::device, Tier::host, Tier::nvme}) {
      if ((stage < 3 || input.parameter_replicas > 1) && parameters != Tier::device) continue;
      for (const Tier state : {Tier::device, Tier::host, Tier::nvme}) {
        for (const Tier gradients : {Tier::device, Tier::host}) {
          if (state < parameters || state < gradients) continue;
          const std::array tiers{parameters, gradients, state};
          if (!std::ranges::all_of(tiers, [&](Tier tier) { return is_a_choice(tier, input.machine); })) continue;
          Placement placement = placement_of_stage(stage, input.ranks);
          placement.parameter_replicas = input.parameter_replicas;
          placement.parameters = Spread(parameters);
          placement.gradients = Spread(gradients);
          placement.state = Spread(state);
          all.push_back(placement);
        }
      }
    }
  }
  return all;
}

Ledger memory_of(const ChoiceInput& input, const Placement& placement) {
  const CutModel cut(input.model, options_of(input, placement, 0));
  const Ledger ledger = ledger_of(outline(cut.input), cut.blocks.records());
  return input.other_optimizer == nullptr ? ledger : together(ledger, memory_of(*input.other_optimizer, placement));
}

bool fits(const Ledger& ledger, const Machine& machine) { return shortage(ledger, machine) == 0; }

Choice price(const ChoiceInput& input, const Placement& placement) {
  if (input.micro_steps > 2 * some_micro_steps && !input.schedule.layer_major) {
    ChoiceInput fewer = input;
    fewer.micro_steps = few_micro_steps;
    const Simulation few = price(fewer, placement).simulation;
    fewer.micro_steps = some_micro_steps;
    Choice choice = price(fewer, placement);
    const double times = static_cast<double>(input.micro_steps - some_micro_steps) /
                         static_cast<double>(some_micro_steps - few_micro_steps);
    choice.simulation = extrapolated(few, choice.simulation, times);
    return choice;
  }
  const CutModel cut(input.model, options_of(input, placement, 0));
  const Program program = compile(cut.input);
  const Program simulated = with_activations(program, input.work, input.activations);
  Choice choice{placement, ledger_of(program, cut.blocks.records()),
                simulate({simulated, placement, input.machine, input.work, input.waits_for_updates})};
  if (input.other_optimizer == nullptr) return choice;
  const Choice other = price(*input.other_optimizer, placement);
  choice.ledger = together(choice.ledger, other.ledger);
  choice.simulation += other.simulation;
  return choice;
}

Choice choose(const ChoiceInput& input) {
  Search search(input);
  search.run();
  if (!search.best()) fail_to_fit(input, search.closest());
  return *search.best();
}

}  // namespace ballast
