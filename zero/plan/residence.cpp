#include "zero/plan/residence.h"

#include <algorithm>

namespace ballast {
namespace {

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

}  // namespace

std::vector<UnitResidence> reside(const Placement& placement, const Layout& layout) {
  Dealer parameters(placement.parameters);
  Dealer gradients(placement.gradients);
  Dealer state(placement.state);
  std::vector<UnitResidence> units;
  for (const UnitLayout& unit : layout.units) {
    UnitResidence& at = units.emplace_back();
    at.parameters = parameters.deal(static_cast<double>(unit.elements()));
    at.gradients = gradients.deal(static_cast<double>(unit.trained.shard));
    at.state = unit.tiers;
    if (at.state.empty()) {
      for (const Range& tile : unit.tiles) {  // parameters on a drive are read from records, so all tiles need one
        at.state.push_back(std::max(at.parameters, state.deal(static_cast<double>(tile.count))));
      }
    }
    const bool on_device = std::ranges::any_of(at.state, [](Tier tier) { return tier == Tier::device; });
    if (on_device) at.gradients = Tier::device;
  }
  return units;
}

}  // namespace ballast
