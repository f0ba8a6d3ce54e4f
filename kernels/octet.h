// Eight consecutive elements: the work of one thread of a CUDA walk. Aligned octets use 16-byte accesses; an octet at
// an unaligned address or at an array's end is accessed element by element. This is plain C++ that runs on both
// devices, so that tests on a CPU cover it.
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

// The octet of `T`s as it lies in memory, aligned to 8 bytes for one-byte elements, else to 16.
template <class T>
struct alignas(sizeof(T) == 1 ? 8 : 16) PackedOctet {
  static constexpr std::size_t elements_per_word = 4 / sizeof(T);
  std::uint32_t words[octet_size / elements_per_word];
};

template <class T>
constexpr std::size_t octet_alignment = alignof(PackedOctet<T>);

// Returns whether octets of elements of this size may be accessed whole. A null pointer is aligned.
inline bool is_octet_aligned(const std::byte* array, std::size_t element_bytes) {
  const std::size_t needed = element_bytes == 1 ? octet_alignment<std::uint8_t> : octet_alignment<std::uint32_t>;
  return reinterpret_cast<std::uintptr_t>(array) % needed == 0;
}

template <class T>
constexpr Octet unpack(const PackedOctet<T>& packed) {
  constexpr std::size_t each = PackedOctet<T>::elements_per_word;
  constexpr std::uint32_t mask = static_cast<T>(~T{0});
  Octet octet{};
  for (std::size_t i = 0; i < octet_size; ++i) {
    octet.at[i] = packed.words[i / each] >> (8 * sizeof(T) * (i % each)) & mask;
  }
  return octet;
}

template <class T>
constexpr PackedOctet<T> pack(const Octet& octet) {
  constexpr std::size_t each = PackedOctet<T>::elements_per_word;
  PackedOctet<T> packed{};
  for (std::size_t i = 0; i < octet_size; ++i) {
    packed.words[i / each] |= std::uint32_t{static_cast<T>(octet.at[i])} << (8 * sizeof(T) * (i % each));
  }
  return packed;
}

// Returns a stored byte as a signed number.
constexpr std::uint32_t sign_extended(std::uint32_t byte) { return (byte ^ 0x80u) - 0x80u; }

// Reads an octet of `T`s. Elements from `place.count` on read as zero.
template <class T, bool Whole>
constexpr Octet load_octet(const std::byte* array, const OctetPlace& place) {
  const std::byte* from = array + place.first * sizeof(T);
  if constexpr (Whole) {
    PackedOctet<T> packed;
    __builtin_memcpy(&packed, __builtin_assume_aligned(from, octet_alignment<T>), sizeof packed);
    return unpack(packed);
  } else {
    Octet octet{};
    for (std::size_t i = 0; i < octet_size; ++i) {
      if (i < place.count) {
        octet.at[i] = reinterpret_cast<const T*>(from)[i];
      }
    }
    return octet;
  }
}

// Writes the low bits of the octet's first `place.count` elements.
template <class T, bool Whole>
constexpr void store_octet(std::byte* array, const OctetPlace& place, const Octet& octet) {
  std::byte* to = array + place.first * sizeof(T);
  if constexpr (Whole) {
    const PackedOctet<T> packed = pack<T>(octet);
    __builtin_memcpy(__builtin_assume_aligned(to, octet_alignment<T>), &packed, sizeof packed);
  } else {
    for (std::size_t i = 0; i < octet_size; ++i) {
      if (i < place.count) {
        reinterpret_cast<T*>(to)[i] = static_cast<T>(octet.at[i]);
      }
    }
  }
}

}  // namespace ballast::kernels
