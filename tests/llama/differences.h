// Compares gradients with finite differences of a function.
#pragma once

#include <ballast/view.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <span>
#include <vector>

#include "examples/llama/noise.h"

namespace ballast::testing {

using Floats = std::vector<float>;

inline View view_of(Floats& numbers) { return View(std::span(numbers)); }

// Returns uniform values from -size to size.
inline Floats random_floats(std::size_t count, std::uint64_t seed, float size = 1.0f) {
  Floats numbers(count);
  for (std::size_t i = 0; i < count; ++i) {
    numbers[i] = size * static_cast<float>(static_cast<std::int32_t>(llama::noise({seed, i}) >> 32)) * 0x1p-31f;
  }
  return numbers;
}

// Returns a weighted sum of the numbers. Its gradient is `weights`.
inline double weighed(std::span<const float> numbers, std::span<const float> weights) {
  double sum = 0;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    sum += double{numbers[i]} * double{weights[i]};
  }
  return sum;
}

// Checks that `gradient` is the gradient of `value`, which is computed from `x`. Values are fp32, so an error of 1/500
// of the largest slope is allowed, for rounding and curvature.
inline void check_gradient(const std::function<double()>& value, Floats& x, const Floats& gradient) {
  constexpr float distance = 1e-2f;
  REQUIRE(x.size() == gradient.size());
  float largest = 0, worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float here = x[i];
    x[i] = here + distance;
    const double above = value();
    x[i] = here - distance;
    const double below = value();
    x[i] = here;
    const auto slope = static_cast<float>((above - below) / (2 * double{distance}));
    largest = std::max(largest, std::abs(slope));
    worst = std::max(worst, std::abs(slope - gradient[i]));
  }
  CHECK(largest > 0);
  CHECK(worst <= largest / 500);
}

}  // namespace ballast::testing
