// Spreads that keep everything on one tier, by the tier's name.
#pragma once

#include <ballast/placement.h>

namespace ballast::testing {

inline constexpr Spread device{1, 0, 0}, host{0, 1, 0}, nvme{0, 0, 1};

}  // namespace ballast::testing
