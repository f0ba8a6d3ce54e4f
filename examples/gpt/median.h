// The middle of what was measured: one slow step or round does not count.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

namespace ballast::gpt {

// Of at least one value; of an even number of them, the mean of the two in the middle.
inline double median(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t above = values.size() / 2;
  return std::midpoint(values[(values.size() - 1) / 2], values[above]);
}

}  // namespace ballast::gpt
