// The arrays of a sum, divided into passes that add as many as a walk takes at once.
#pragma once

#include <ballast/view.h>

#include <algorithm>
#include <span>

#include "kernels/numbers.h"

namespace ballast::kernels {

// Calls body(summands) for each pass over a range of elements. All arrays have one format and one count; a pass adds
// `most` of them.
template <class Body>
void each_pass(std::span<const ConstView> from, std::size_t first, std::size_t count, Body&& body,
               std::size_t most = Summands::most) {
  for (std::size_t begin = 0; begin < from.size(); begin += most) {
    const auto arrays = from.subspan(begin, std::min(most, from.size() - begin));
    Summands summands{.arrays = arrays.size(), .dtype = arrays[0].dtype(), .continues = begin > 0};
    std::ranges::transform(arrays, summands.data,
                           [&](const ConstView& array) { return array.data() + first * byte_size(array.dtype()); });
    summands.count = count;
    body(summands);
  }
}

}  // namespace ballast::kernels
