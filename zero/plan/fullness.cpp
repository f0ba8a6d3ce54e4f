#include "zero/plan/fullness.h"

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

}  // namespace ballast
