// The division of work: of arrays into tasks for CPU threads, of sums into passes that add as many arrays as a walk takes at once.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/numbers.h"
#include "kernels/threads.h"

namespace ballast::kernels {

// Small enough to balance the threads, and large enough that memory is read in long stretches.
inline constexpr std::size_t elements_per_task = 64 * 1024;
static_assert(elements_per_task % group_size == 0, "a group of elements belongs to one task");

// Calls body(first, count) for consecutive pieces of `count` elements.
template <class Body>
void each_piece(const Threads& threads, std::size_t count, Body&& body) {
  const std::size_t pieces = count / elements_per_task + (count % elements_per_task != 0 ? 1 : 0);
  threads.each(pieces, [&](std::size_t i) {
    const std::size_t first = i * elements_per_task;
    body(first, std::min(elements_per_task, count - first));
  });
}

// Cuts runs into pieces, none of them empty.
inline std::vector<Run> cut(std::span<const Run> runs) {
  std::vector<Run> pieces;
  for (const Run& run : runs) {
    for (std::size_t first = 0; first < run.count; first += elements_per_task) {
      pieces.push_back(part(run, first, std::min(elements_per_task, run.count - first)));
    }
  }
  return pieces;
}

inline Numbers numbers(const View& view, std::size_t first, std::size_t count) {
  return {view.data() + first * byte_size(view.dtype()), count, view.dtype()};
}
inline ConstNumbers numbers(const ConstView& view, std::size_t first, std::size_t count) {
  return {view.data() + first * byte_size(view.dtype()), count, view.dtype()};
}

// Targets larger than the caches are written past the caches.
inline constexpr std::size_t bytes_to_stream = 4 * 1024 * 1024;
inline Stores stores_for(std::size_t bytes_written) {
  return bytes_written >= bytes_to_stream ? Stores::streamed : Stores::cached;
}

// --- The passes of a sum ---

// The arrays of a sum, and whether it continues one that is in the target.
struct SummedViews {
  std::span<const ConstView> arrays;  // of one format and one count
  bool continues = false;
};

// Calls body(summands) for each pass over `count` elements from `first` on; a pass adds `most` arrays.
template <class Body>
void each_pass(const SummedViews& from, std::size_t first, std::size_t count, Body&& body,
               std::size_t most = Summands::most) {
  for (std::size_t begin = 0; begin < from.arrays.size(); begin += most) {
    const auto arrays = from.arrays.subspan(begin, std::min(most, from.arrays.size() - begin));
    Summands summands{.arrays = arrays.size(), .dtype = arrays[0].dtype(), .continues = from.continues || begin > 0};
    std::ranges::transform(arrays, summands.data,
                           [&](const ConstView& array) { return array.data() + first * byte_size(array.dtype()); });
    summands.count = count;
    body(summands);
  }
}

}  // namespace ballast::kernels
