#include "zero/plan/placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/runtime/error.h"

namespace ballast {
namespace {

[[noreturn]] void refuse(std::string what, std::string needed) {
  fail(Code::bad_argument, {.what = std::move(what), .needed = std::move(needed)});
}

// Deals things out in the proportions of a spread. Each goes to the tier that lacks most.
class Dealer {
 public:
  explicit Dealer(const Spread& spread) : fractions_(spread.fractions()) {}

  Tier deal(double weight) {
    total_ += weight;
    std::array<double, tier_count> missing{};
    for (std::size_t tier = 0; tier < tier_count; ++tier) {
      missing[tier] = fractions_[tier] * total_ - dealt_[tier];
    }
    const auto most = static_cast<std::size_t>(std::ranges::max_element(missing) - missing.begin());
    dealt_[most] += weight;
    return static_cast<Tier>(most);
  }

 private:
  std::array<double, tier_count> fractions_;
  std::array<double, tier_count> dealt_{};
  double total_ = 0.0;
};

void check(std::string_view what, const Spread& spread) {
  const auto fractions = spread.fractions();
  const bool in_range = std::ranges::all_of(fractions, [](double x) { return x >= 0.0 && x <= 1.0; });
  const double sum = std::accumulate(fractions.begin(), fractions.end(), 0.0);
  if (!in_range || std::abs(sum - 1.0) > 1e-6) {
    refuse(fmt::format("cannot place {}: the fractions are {} on the device, {} on the host and {} on drives", what,
                       spread.device, spread.host, spread.nvme),
           "fractions from 0 to 1 that add up to 1");
  }
}

}  // namespace

std::string_view name(Tier tier) {
  constexpr std::string_view names[] = {"device", "host", "nvme"};
  return names[static_cast<std::size_t>(tier)];
}

Spread all_in(Tier tier) {
  return {tier == Tier::device ? 1.0 : 0.0, tier == Tier::host ? 1.0 : 0.0, tier == Tier::nvme ? 1.0 : 0.0};
}

Placement placement_of_stage(int stage, std::size_t ranks) {
  require(stage >= 0 && stage <= 3, Code::bad_argument,
          [&] { return Problem{.what = fmt::format("there is no stage {}", stage), .needed = "0, 1, 2 or 3"}; });
  return {.shards = stage == 0 ? 1 : ranks, .replicas = stage == 0 ? ranks : 1, .full_parameters = stage < 3};
}

void check(const Placement& placement) {
  if (placement.shards == 0 || placement.replicas == 0) {
    refuse(fmt::format("cannot place a model on a mesh of {} x {} ranks", placement.shards, placement.replicas),
           "at least one rank each way");
  }
  check("parameters", placement.parameters);
  check("gradients", placement.gradients);
  check("optimizer states", placement.state);
  if (placement.gradients.nvme > 0.0) refuse("cannot keep gradients on a drive", "the device or the host");
  if (placement.full_parameters && placement.parameters != Spread{}) {
    refuse("cannot keep full parameters outside the device", "stage 3, or parameters on the device");
  }
}

std::vector<UnitResidence> reside(const Placement& placement, const Layout& layout) {
  Dealer parameters(placement.parameters);
  Dealer gradients(placement.gradients);
  Dealer state(placement.state);
  std::vector<UnitResidence> units;
  for (const UnitLayout& unit : layout.units) {
    UnitResidence& at = units.emplace_back();
    at.parameters = parameters.deal(static_cast<double>(unit.elements()));
    at.gradients = gradients.deal(static_cast<double>(unit.trained.shard));
    for (const Range& tile : unit.tiles) {  // parameters on a drive are read from records, so all tiles need one
      at.state.push_back(std::max(at.parameters, state.deal(static_cast<double>(tile.count))));
    }
    const bool on_device = std::ranges::any_of(at.state, [](Tier tier) { return tier == Tier::device; });
    if (on_device) at.gradients = Tier::device;
  }
  return units;
}

}  // namespace ballast
