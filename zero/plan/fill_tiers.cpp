#include "zero/plan/fill_tiers.h"

#include <algorithm>

namespace ballast {
namespace {

constexpr int bisections = 7;  // parts are known to a hundredth

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

bool holds(const ChoiceInput& input, const Placement& placement, Tier tier) {
  const auto number = static_cast<std::size_t>(tier);
  return needs(memory_of(input, placement), input.machine)[number] <= input.machine.bytes[number];
}

// Returns the greatest part for which the condition holds, which it does below some part; 0 if for none.
template <class Condition>
double greatest_part(const Condition& holds) {
  if (holds(1.0)) return 1.0;
  double part = 0.0;
  for (double step = 0.5; step > 1.0 / (1 << bisections); step /= 2) {
    if (holds(part + step)) part += step;
  }
  return part;
}

double part_on_device(const ChoiceInput& input, double in_memory) {
  if (input.parameter_replicas > 1) return 1.0;  // copies of parameters are on the device
  return greatest_part([&](double part) { return holds(input, filled(input, part, in_memory), Tier::device); });
}

}  // namespace

std::optional<Placement> fill_tiers(const ChoiceInput& input) {
  const auto& bytes = input.machine.bytes;
  if (input.stage.value_or(3) != 3 || input.machine.host_is_device || bytes[1] == 0) return {};
  const double in_memory = bytes[2] == 0 ? 1.0 : greatest_part([&](double part) {
    return holds(input, filled(input, part_on_device(input, part), part), Tier::host);
  });
  return filled(input, part_on_device(input, in_memory), in_memory);
}

}  // namespace ballast
