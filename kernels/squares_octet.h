// The parts of CUDA's sum of squares that decide its bits.
#pragma once

#include "kernels/octet.h"

namespace ballast::kernels {

inline constexpr unsigned square_lanes = 8;  // see sum_of_squares_walk.h

// Lane l adds up the squares of elements l, l + 8, l + 16, ... of a group.
constexpr double squares_of_lane(const float* group, unsigned lane) {
  double sum = 0.0;
  for (std::size_t i = 0; i < group_size; i += square_lanes) {
    const auto x = static_cast<double>(group[i + lane]);
    sum = sum + x * x;
  }
  return sum;
}

}  // namespace ballast::kernels
