// The CPU walk that looks for the first NaN or infinity, for any width of lanes S.
#pragma once

#include "kernels/number_walk.h"

namespace ballast::kernels {

// Returns whether no value of a whole block has all exponent bits set. `count` is a multiple of the width.
template <class S, class Format>
bool all_finite(const typename Format::Stored* values, std::size_t count) {
  using U = typename S::U;
  U largest(0u);
  for (std::size_t i = 0; i < count; i += S::width) {
    largest = max(largest, load_pattern<S, Format>(values + i) & U(Format::infinity));
  }
  return S::max_of_lanes(largest) < Format::infinity;
}

template <class S, class Format>
std::size_t position_in_block(const typename Format::Stored* values, std::size_t count) {
  std::size_t i = 0;
  while (i < count && all_finite<S, Format>(Padded<S, typename Format::Stored>(values + i, 1).at, S::width)) {
    ++i;
  }
  return i;
}

// Returns the position of the first NaN or infinity, or the count if there is none.
template <class S>
std::size_t first_non_finite_walk(const ConstNumbers& values) {
  constexpr std::size_t block = 1024;
  return with_format(values.dtype, [&]<class Format>(Format) {
    const auto* from = elements<Format>(values);
    const std::size_t whole = values.count - values.count % S::width;
    for (std::size_t first = 0; first < whole; first += block) {
      const std::size_t count = whole - first < block ? whole - first : block;
      if (!all_finite<S, Format>(from + first, count)) {
        return first + position_in_block<S, Format>(from + first, count);
      }
    }
    return whole + position_in_block<S, Format>(from + whole, values.count - whole);
  });
}

}  // namespace ballast::kernels
