// The CPU walk of sums of squares, for any width of lanes S: one double for each group of elements. exact_sum_math.h
// adds these up. Squares of fp32 are exact in double, so a multiplication and an addition give the result of a fused
// one.
#pragma once

#include "kernels/number_walk.h"
#include "kernels/state_math.h"

namespace ballast::kernels {

// Lane l adds up elements l, l + 8, l + 16, ... of the group. Then the lanes are added in halves (S::sum_of_lanes).
template <class S>
double sum_of_group(const float* group) {
  typename S::Doubles sum{};
  for (std::size_t i = 0; i < group_size; i += 8) {
    const auto x = S::load_doubles(group + i);
    sum = sum + x * x;
  }
  return S::sum_of_lanes(sum);
}

// The elements that a last, incomplete group lacks count as zeros.
template <class S>
void sum_of_squares_walk(const ConstNumbers& values, double* sum_of_each_group) {
  with_format(values.dtype, [&]<class Format>(Format) {
    const auto* from = elements<Format>(values);
    alignas(64) float group[group_size]{};
    const std::size_t rest = values.count % group_size;
    for (std::size_t first = 0; first < values.count - rest; first += group_size) {
      if constexpr (std::is_same_v<Format, Fp32Format>) {
        *sum_of_each_group++ = sum_of_group<S>(from + first);
      } else {
        for (std::size_t i = 0; i < group_size; i += S::width) {
          S::store(group + i, load_number<S, Format>(from + first + i));
        }
        *sum_of_each_group++ = sum_of_group<S>(group);
      }
    }
    if (rest > 0) {
      typename Format::Stored last[group_size]{};
      std::memcpy(last, from + (values.count - rest), rest * sizeof last[0]);
      for (std::size_t i = 0; i < group_size; i += S::width) {
        S::store(group + i, load_number<S, Format>(last + i));
      }
      *sum_of_each_group = sum_of_group<S>(group);
    }
  });
}

}  // namespace ballast::kernels
