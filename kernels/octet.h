// Eight consecutive elements: the work of one thread of a CUDA walk. Aligned octets use 16-byte accesses; an octet at
// an unaligned address or at an array's end is accessed element by element. This is plain C++ that runs on both
// devices, so that tests on a CPU cover it. Stretches of memory are cut into chunks, one for each block of a launch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/state_math.h"

namespace ballast::kernels {

inline constexpr std::size_t octet_size = 8;
inline constexpr unsigned threads_per_group = group_size / octet_size;  // half a warp

// The elements that one block of threads processes at a time.
inline constexpr unsigned threads_per_chunk = 256;
inline constexpr std::size_t chunk_size = threads_per_chunk * octet_size;

// The patterns of stored values, each in the low bits of its own word.
struct Octet {
  std::uint32_t at[octet_size];
};

// The position of a thread's elements in their array, and whether aligned accesses of the whole octet are possible.
struct OctetPlace {
  std::size_t first = 0;
  unsigned count = 0;  // fewer than eight at a run's end, zero after it
  bool whole = false;
};

// The element type of an array of 4-bit codes: two share a byte, the first in its lower half. An octet begins a byte.
struct Nibble {};

template <class T>
constexpr std::size_t bits_of = 8 * sizeof(T);
template <>
inline constexpr std::size_t bits_of<Nibble> = 4;

// The alignment that accesses of a whole octet of this size need: its size, at most 16 bytes.
constexpr std::size_t octet_alignment(std::size_t octet_bytes) { return octet_bytes < 16 ? octet_bytes : 16; }

// The octet of `T`s as it lies in memory.
template <class T>
struct alignas(octet_alignment(bits_of<T>)) PackedOctet {  // eight elements have as many bytes as one has bits
  static constexpr std::size_t elements_per_word = 32 / bits_of<T>;
  std::uint32_t words[octet_size / elements_per_word];
};

// Returns whether octets of this size may be accessed whole. A null pointer is aligned.
inline bool is_octet_aligned(const std::byte* array, std::size_t octet_bytes) {
  return reinterpret_cast<std::uintptr_t>(array) % octet_alignment(octet_bytes) == 0;
}

template <class T>
constexpr std::uint32_t low_bits = 0xffffffffu >> (32 - bits_of<T>);

template <class T>
constexpr Octet unpack(const PackedOctet<T>& packed) {
  constexpr std::size_t each = PackedOctet<T>::elements_per_word;
  Octet octet{};
  for (std::size_t i = 0; i < octet_size; ++i) {
    octet.at[i] = packed.words[i / each] >> (bits_of<T> * (i % each)) & low_bits<T>;
  }
  return octet;
}

template <class T>
constexpr PackedOctet<T> pack(const Octet& octet) {
  constexpr std::size_t each = PackedOctet<T>::elements_per_word;
  PackedOctet<T> packed{};
  for (std::size_t i = 0; i < octet_size; ++i) {
    packed.words[i / each] |= (octet.at[i] & low_bits<T>) << (bits_of<T> * (i % each));
  }
  return packed;
}

template <class T>
constexpr std::uint32_t load_element(const std::byte* from, std::size_t i) {
  if constexpr (bits_of<T> < 8) {
    return static_cast<std::uint32_t>(from[i / 2]) >> (4 * (i % 2)) & low_bits<T>;
  } else {
    return reinterpret_cast<const T*>(from)[i];
  }
}

// Elements are stored in ascending order, so that the second of two in a byte adds itself to the first.
template <class T>
constexpr void store_element(std::byte* to, std::size_t i, std::uint32_t x) {
  if constexpr (bits_of<T> < 8) {
    const auto code = static_cast<std::byte>(x & low_bits<T>);
    to[i / 2] = i % 2 == 0 ? code : to[i / 2] | code << 4;
  } else {
    reinterpret_cast<T*>(to)[i] = static_cast<T>(x);
  }
}

// Reads an octet of `T`s. Elements from `place.count` on read as zero.
template <class T, bool Whole>
constexpr Octet load_octet(const std::byte* array, const OctetPlace& place) {
  const std::byte* from = array + place.first * bits_of<T> / 8;
  Octet octet{};
  if constexpr (Whole) {
    PackedOctet<T> packed;
    __builtin_memcpy(&packed, __builtin_assume_aligned(from, alignof(PackedOctet<T>)), sizeof packed);
    octet = unpack(packed);
  } else {
    for (std::size_t i = 0; i < octet_size; ++i) {
      if (i < place.count) octet.at[i] = load_element<T>(from, i);
    }
  }
  return octet;
}

// Writes the low bits of the octet's first `place.count` elements. The other half of a byte that begins with the last
// of them becomes zero.
template <class T, bool Whole>
constexpr void store_octet(std::byte* array, const OctetPlace& place, const Octet& octet) {
  std::byte* to = array + place.first * bits_of<T> / 8;
  if constexpr (Whole) {
    const PackedOctet<T> packed = pack<T>(octet);
    __builtin_memcpy(__builtin_assume_aligned(to, alignof(PackedOctet<T>)), &packed, sizeof packed);
  } else {
    for (std::size_t i = 0; i < octet_size; ++i) {
      if (i < place.count) store_element<T>(to, i, octet.at[i]);
    }
  }
}

// --- The division of arrays among the blocks of a launch ---

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
