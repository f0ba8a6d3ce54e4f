// The median of measured values: one slow step or round does not change it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

namespace ballast::gpt {

// Takes at least one value. Of an even number of values, returns the mean of the two in the middle.
inline double median(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t above = values.size() / 2;
  return std::midpoint(values[(values.size() - 1) / 2], values[above]);
}

}  // namespace ballast::gpt
