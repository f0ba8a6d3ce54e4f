// Ways that give the same bits, of which a program takes the faster one, by the rates of the machine.
#pragma once

#include <algorithm>

#include "zero/plan/compile_input.h"
#include "zero/plan/program.h"

namespace ballast {

// How many elements the host updates in its own memory alone, for each one whose parameter the device keeps and whose state the
// host does. The device would copy all that their update reads and writes, and save the host's memory nothing. Where state is on
// drives, these take the time.
inline double others_of_visitors(const CompileInput& input, const std::vector<UnitResidence>& residence) {
  if (input.placement.state.nvme > 0.0) return 0;
  double stay = 0;
  double may_visit = 0;
  for (std::size_t unit = 0; unit < residence.size(); ++unit) {
    const UnitResidence& at = residence[unit];
    const auto tiles = static_cast<double>(std::ranges::count(at.state, Tier::host));
    const double elements = tiles * static_cast<double>(input.layout.units[unit].tile_elements);
    if (at.parameters == Tier::device) may_visit += elements;
    if (at.parameters == Tier::host && at.gradients == Tier::host) stay += elements;
  }
  return may_visit > 0 ? stay / may_visit : 0;
}

// How many of a unit's tiles on the host the device updates: so many that the links, and the host's memory, through which each
// byte of a link passes too, are done earliest, with the updates and copies of `others` (see above) that each tile's part has.
inline std::size_t visitors_of(const CompileInput& input, const UnitResidence& at, std::size_t unit, double others) {
  const TransferRates& rates = input.rates;
  if (input.host_is_device || rates.host_memory == 0) return 0;
  const auto elements = static_cast<double>(input.layout.units[unit].tile_elements);
  const double parameter = elements * static_cast<double>(input.width(unit));
  const double gradient = elements * static_cast<double>(input.width_of_sums(unit));
  const auto state = static_cast<double>(input.blocks.of(unit).state);
  const bool has_parameters = at.parameters == Tier::device;
  const bool has_gradients = at.gradients == Tier::device;
  // Bytes of a visitor on the links, and of another tile on the links and in its update.
  const double leaves = state + (has_parameters ? 0 : parameter);
  const double arrives = leaves + (has_gradients ? 0 : gradient);
  const double up = has_parameters ? parameter : 0;
  const double down = has_gradients ? gradient : 0;
  const double update = gradient + 2 * parameter + 2 * state;
  const auto tiles = static_cast<std::size_t>(std::ranges::count(at.state, Tier::host));
  const double other = has_parameters ? others * static_cast<double>(tiles) : 0;
  const auto seconds = [&](std::size_t visitors) {
    const auto there = static_cast<double>(visitors);
    const auto here = static_cast<double>(tiles - visitors);
    return std::max({(there * arrives + here * up + other * parameter) / rates.upload,
                     (there * leaves + here * down) / rates.download,
                     (there * (arrives + leaves) + here * (up + down + update) + other * (parameter + update)) /
                         rates.host_memory});
  };
  std::size_t best = 0;
  for (std::size_t visitors = 1; visitors <= tiles; ++visitors) {
    if (seconds(visitors) < seconds(best)) best = visitors;
  }
  return best;
}

// Whether copies from the host's memory, which all ranks reach, are faster than those between the devices. Ranks that have other
// parts of a unit do not share it there.
inline bool shares_host(const CompileInput& input, std::size_t unit) {
  const Placement& placement = input.placement;
  const auto shards = static_cast<double>(placement.shards);
  return input.shares_memory && !input.host_is_device && placement.parameter_replicas == 1 &&
         input.model.units[unit].parts == 1 && (shards - 1) * input.rates.shared > shards * input.rates.peers;
}

// Whether each device copies the parameters of all ranks from the host. Otherwise it copies its own shard, and the devices gather
// shards from each other.
inline bool gathers_from_host(const CompileInput& input, const UnitResidence& at, std::size_t unit) {
  return shares_host(input, unit) && at.parameters == Tier::host && !input.gathers_codes(unit);
}

// Whether the ranks' gradients of a unit whose sums are kept on the host are copied there and summed by its processor, in place of
// sums on the devices that are copied there. Gradients pass the host's memory twice: a copy writes them, and the sum reads them.
inline bool sums_on_host(const CompileInput& input, const UnitResidence& at, std::size_t unit) {
  const Placement& placement = input.placement;
  const auto shards = static_cast<double>(placement.shards);
  const TransferRates& rates = input.rates;
  return shares_host(input, unit) && at.gradients == Tier::host && placement.groups() == 1 &&
         placement.reduction == Reduction::each && input.wire.reduce == WireFormat::exact && rates.host_memory > 0 &&
         input.layout.units[unit].trained.shard > 0 &&
         (1 / rates.download + 1 / rates.host_memory) * shards * rates.peers < shards - 1;
}

}  // namespace ballast
