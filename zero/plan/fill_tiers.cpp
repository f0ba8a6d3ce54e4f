#include "zero/plan/fill_tiers.h"

#include <algorithm>
#include <cmath>

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
  placement.parameters = {.device = on_device, .host = 1.0 - on_device};
  placement.gradients = placement.parameters;
  placement.state = {.device = in_memory, .nvme = 1.0 - in_memory};  // those of the host are no nearer than parameters
  return placement;
}

double part_on_device(const ChoiceInput& input, double in_memory) {
  if (input.parameter_replicas > 1) return 1.0;  // copies of parameters are on the device
  return round_fraction(greatest_part(finest_of_units, [&](double part) {
    return fullness(input, filled(input, part, in_memory), Tier::device, Tier::host);
  }));
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
  if (input.stage.value_or(3) != 3 || input.machine.host_is_device || bytes[1] == 0) return {};
  const double in_memory = bytes[2] == 0 ? 1.0 : round_fraction(greatest_part(finest_of_tiles, [&](double part) {
    return fullness(input, filled(input, part_on_device(input, part), part), Tier::host, Tier::nvme);
  }));
  return filled(input, part_on_device(input, in_memory), in_memory);
}

Placement with_one_more_unit(const ChoiceInput& input, const Placement& filled) {
  Placement placement = filled;
  const double more = 1.0 / static_cast<double>(input.model.units.size());
  const double on_device = std::min(1.0, round_fraction(filled.parameters.device + more));
  placement.parameters = placement.gradients = {.device = on_device, .host = 1.0 - on_device};
  placement.state = all_in(input.machine.bytes[2] > 0 ? Tier::nvme : Tier::host);
  return placement;
}

}  // namespace ballast
