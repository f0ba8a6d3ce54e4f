// The library's own threads, each with a slice of the work.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/threads.h"

namespace ballast::benchmarks {

using kernels::Threads;

// Calls `body(first, last)` for slices that cover 0 to `count`, one for each thread, cut at multiples of `grain`.
template <class Body>
void for_slices(const Threads& threads, std::size_t count, std::size_t grain, const Body& body) {
  const auto slices = static_cast<std::size_t>(threads.count());
  const std::size_t grains = (count + grain - 1) / grain;
  const auto edge = [&](std::size_t slice) { return std::min(count, grains * slice / slices * grain); };
  threads.each(slices, [&](std::size_t slice) { body(edge(slice), edge(slice + 1)); });
}

}  // namespace ballast::benchmarks
