// The division of arrays among the blocks of a CUDA launch: stretches of memory are cut into chunks.
#pragma once

#include "kernels/octet.h"

namespace ballast::kernels {

constexpr std::size_t chunks_of(std::size_t elements) {
  return elements / chunk_size + (elements % chunk_size != 0 ? 1 : 0);
}

struct Stretch {
  std::size_t begin;
  std::size_t end;
  std::size_t chunks_end;  // chunks of this stretch and all before it
  bool aligned;            // whether all arrays are aligned at the beginning of the stretch
};

// The elements of the stretch's nth chunk that one thread of a block processes.
constexpr OctetPlace place_in(const Stretch& stretch, std::size_t nth, unsigned thread) {
  const std::size_t first = stretch.begin + nth * chunk_size + thread * octet_size;
  const std::size_t left = first < stretch.end ? stretch.end - first : 0;
  return {.first = first,
          .count = static_cast<unsigned>(left < octet_size ? left : octet_size),
          .whole = stretch.aligned && left >= octet_size};
}

constexpr Stretch whole_array(std::size_t count, bool aligned) { return {0, count, chunks_of(count), aligned}; }

template <std::size_t capacity>
struct Stretches {
  std::size_t count = 0;
  Stretch at[capacity];
};

template <std::size_t capacity>
constexpr std::size_t chunks(const Stretches<capacity>& stretches) {
  return stretches.count == 0 ? 0 : stretches.at[stretches.count - 1].chunks_end;
}

template <std::size_t capacity>
constexpr void add_stretch(Stretches<capacity>& stretches, std::size_t begin, std::size_t count, bool aligned) {
  stretches.at[stretches.count] = {begin, begin + count, chunks(stretches) + chunks_of(count), aligned};
  ++stretches.count;
}

// The stretch to which a chunk belongs.
template <std::size_t capacity>
constexpr std::size_t stretch_of(const Stretches<capacity>& stretches, std::size_t chunk) {
  std::size_t low = 0;
  std::size_t high = stretches.count - 1;
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (stretches.at[middle].chunks_end <= chunk) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

template <std::size_t capacity>
constexpr OctetPlace place_of(const Stretches<capacity>& stretches, std::size_t index, std::size_t chunk,
                              unsigned thread) {
  const std::size_t before = index == 0 ? 0 : stretches.at[index - 1].chunks_end;
  return place_in(stretches.at[index], chunk - before, thread);
}

}  // namespace ballast::kernels
