// The octets of arrays: what one thread of each CUDA kernel does, but for the optimizer step (update_octet.h). The kernel chooses
// the format at run time: all threads take the same branch, and memory is slower than the branch.
#pragma once

#include "kernels/launch_tables.h"

namespace ballast::kernels {

template <class T>
constexpr Octet load_octet_of(const std::byte* array, const OctetPlace& place) {
  return place.whole ? load_octet<T, true>(array, place) : load_octet<T, false>(array, place);
}

template <class T>
constexpr void store_octet_of(std::byte* array, const OctetPlace& place, const Octet& octet) {
  if (place.whole) {
    store_octet<T, true>(array, place, octet);
  } else {
    store_octet<T, false>(array, place, octet);
  }
}

// Loads patterns. The switch avoids byte_size(): looking the size up in its table would put the table into each
// thread's memory.
constexpr Octet load_octet(const ConstNumbers& numbers, const OctetPlace& place) {
  switch (numbers.dtype) {
    case DType::fp32: return load_octet_of<std::uint32_t>(numbers.data, place);
    case DType::u8: return load_octet_of<std::uint8_t>(numbers.data, place);
    default: return load_octet_of<std::uint16_t>(numbers.data, place);
  }
}

constexpr void store_octet(const Numbers& numbers, const OctetPlace& place, const Octet& octet) {
  switch (numbers.dtype) {
    case DType::fp32: return store_octet_of<std::uint32_t>(numbers.data, place, octet);
    case DType::u8: return store_octet_of<std::uint8_t>(numbers.data, place, octet);
    default: return store_octet_of<std::uint16_t>(numbers.data, place, octet);
  }
}

struct FloatOctet {
  float at[octet_size];
};

template <class Format>
constexpr FloatOctet decode_octet(const Octet& patterns) {
  FloatOctet floats{};
  for (std::size_t i = 0; i < octet_size; ++i) {
    floats.at[i] = Format::decode(patterns.at[i]);
  }
  return floats;
}

template <class Format>
constexpr Octet encode_octet(const FloatOctet& floats) {
  Octet patterns{};
  for (std::size_t i = 0; i < octet_size; ++i) {
    patterns.at[i] = Format::encode(floats.at[i]);
  }
  return patterns;
}

constexpr FloatOctet decode_octet(const Octet& patterns, DType dtype) {  // not for u8
  switch (dtype) {
    case DType::bf16: return decode_octet<Bf16Format>(patterns);
    case DType::fp16: return decode_octet<Fp16Format>(patterns);
    default: return decode_octet<Fp32Format>(patterns);
  }
}

// Loads values; not for u8.
constexpr FloatOctet load_floats(const ConstNumbers& numbers, const OctetPlace& place) {
  return decode_octet(load_octet(numbers, place), numbers.dtype);
}

// Returns the patterns that it stores.
constexpr Octet store_floats(const Numbers& numbers, const OctetPlace& place, const FloatOctet& floats) {
  const auto store = [&](const Octet& patterns) {
    store_octet(numbers, place, patterns);
    return patterns;
  };
  switch (numbers.dtype) {
    case DType::bf16: return store(encode_octet<Bf16Format>(floats));
    case DType::fp16: return store(encode_octet<Fp16Format>(floats));
    default: return store(encode_octet<Fp32Format>(floats));
  }
}

// Equal formats are copied, and every pattern stays as it is.
constexpr void cast_octet(const ConstNumbers& from, const Numbers& to, const OctetPlace& place) {
  if (from.dtype == to.dtype) {
    store_octet(to, place, load_octet(from, place));
  } else {
    store_floats(to, place, load_floats(from, place));
  }
}

// Returns the sum as it is stored.
constexpr FloatOctet sum_octet(const Summands& from, const Numbers& into, const OctetPlace& place) {
  FloatOctet sum{};
  if (from.continues) sum = load_floats({into.data, into.count, into.dtype}, place);
  for (std::size_t array = 0; array < from.arrays; ++array) {
    const FloatOctet added = load_floats({from.data[array], from.count, from.dtype}, place);
    for (std::size_t i = 0; i < octet_size; ++i) {
      sum.at[i] = accumulated(sum.at[i], added.at[i], 1.0f);
    }
  }
  return decode_octet(store_floats(into, place, sum), into.dtype);
}

// --- Stochastic accumulation: eight elements of a run ---

// Returns the sum as it is stored.
constexpr FloatOctet accumulate_in_chunk(const AccumulateTable& table, std::size_t chunk, unsigned thread) {
  const std::size_t run = stretch_of(table.runs, chunk);
  const OctetPlace place = place_of(table.runs, run, chunk, thread);
  const std::uint64_t index = table.indices[run] + (place.first - table.runs.at[run].begin);
  const RoundingKey key = rounding_key(table.streams[run], index);
  const FloatOctet added = load_floats(table.from, place);
  const FloatOctet before = load_floats({table.into.data, table.into.count, table.into.dtype}, place);
  Octet sum{};
  for (std::size_t i = 0; i < octet_size; ++i) {
    const std::uint32_t random = random_bits(static_cast<std::uint32_t>(index + i), key);
    sum.at[i] = accumulated_stochastic(before.at[i], added.at[i], random);
  }
  store_octet(table.into, place, sum);
  return decode_octet<Bf16Format>(sum);
}

// --- The first NaN or infinity among a thread's elements ---

constexpr std::uint32_t infinity_of(DType dtype) {
  switch (dtype) {
    case DType::bf16: return Bf16Format::infinity;
    case DType::fp16: return Fp16Format::infinity;
    default: return Fp32Format::infinity;
  }
}

// `index` is the index of the first element. Returns UINT64_MAX if all elements are finite.
constexpr std::uint64_t first_non_finite_of(const Octet& patterns, std::uint32_t infinity, std::uint64_t index) {
  for (std::size_t i = 0; i < octet_size; ++i) {
    if ((patterns.at[i] & infinity) == infinity) {
      return index + i;
    }
  }
  return UINT64_MAX;
}

// --- The parts of the sum of squares that decide its bits ---

inline constexpr unsigned square_lanes = 8;  // see sum_of_group() in array_walk.h

// Lane l adds up the squares of elements l, l + 8, l + 16, ... of a group.
constexpr double squares_of_lane(const float* group, unsigned lane) {
  double sum = 0.0;
  for (std::size_t i = 0; i < group_size; i += square_lanes) {
    const auto x = static_cast<double>(group[i + lane]);
    sum = sum + x * x;
  }
  return sum;
}

// --- Block quantization: the sixteen threads of a group share its largest magnitude ---

constexpr std::uint32_t largest_magnitude(const FloatOctet& floats) {
  std::uint32_t largest = 0;
  for (const float x : floats.at) {
    largest = max(largest, bits(magnitude(x)));
  }
  return largest;
}

// `index` is the index of the first element in its unit.
constexpr Octet to_codes(const FloatOctet& floats, const GroupScale& scale, CodeBits code_bits,
                         const CodeRounding& rounding, std::uint64_t index) {
  const auto largest = static_cast<std::uint32_t>(largest_code(code_bits));
  const RoundingKey key = rounding_key(rounding.stream, index);
  Octet codes{};
  for (std::size_t i = 0; i < octet_size; ++i) {
    if (scale.factor == 0.0f) {
      codes.at[i] = 0;
    } else if (rounding.stochastic) {
      const float noise = noise_of(random_bits(static_cast<std::uint32_t>(index + i), key));
      codes.at[i] = to_stochastic_code(floats.at[i], scale.factor, noise, largest);
    } else {
      codes.at[i] = to_nearest_code(floats.at[i], scale.factor, largest);
    }
  }
  return codes;
}

constexpr FloatOctet from_codes(const Octet& codes, float scale) {
  FloatOctet floats{};
  for (std::size_t i = 0; i < octet_size; ++i) {
    floats.at[i] = from_code(codes.at[i], scale);
  }
  return floats;
}

// --- Blocks in memory. They are aligned to 4 bytes, so an octet is accessed as one word of codes or as two. ---

// The words of an octet's codes. `first` is the octet's first element.
template <class Byte>
constexpr auto* codes_at(Byte* blocks, CodeBits code_bits, std::size_t first) {
  const std::size_t in_group = first % group_size;
  return blocks + first / group_size * block_bytes(code_bits) + scale_bytes +
         (code_bits == CodeBits::eight ? in_group : in_group / 2);
}

template <class T, class Byte>
constexpr void store_code_words(Byte* to, const Octet& octet) {
  const PackedOctet<T> packed = pack<T>(octet);
  __builtin_memcpy(__builtin_assume_aligned(to, scale_bytes), &packed, sizeof packed);
}

template <class T, class Byte>
constexpr Octet load_code_words(const Byte* from) {
  PackedOctet<T> packed;
  __builtin_memcpy(&packed, __builtin_assume_aligned(from, scale_bytes), sizeof packed);
  return unpack(packed);
}

// Writes all eight codes, those past the array's last element too, and the scale before the first codes of a group. Writes
// nothing for groups past the last element.
constexpr void store_quantized(const QuantizedPiece& to, std::size_t count, const OctetPlace& place,
                               const GroupScale& scale, const Octet& codes) {
  if (place.first / group_size * group_size >= count) return;
  std::byte* const at = codes_at(to.blocks, to.bits, place.first);
  if (place.first % group_size == 0) {
    __builtin_memcpy(__builtin_assume_aligned(at - scale_bytes, scale_bytes), &scale.scale, scale_bytes);
  }
  if (to.bits == CodeBits::eight) {
    store_code_words<std::uint8_t>(at, codes);
  } else {
    store_code_words<Nibble>(at, codes);
  }
}

// The values of an octet that holds elements.
constexpr FloatOctet load_quantized(const ConstQuantizedPiece& from, const OctetPlace& place) {
  const std::byte* const at = codes_at(from.blocks, from.bits, place.first);
  const bool eight = from.bits == CodeBits::eight;
  Octet codes = eight ? load_code_words<std::uint8_t>(at) : load_code_words<Nibble>(at);
  for (std::uint32_t& code : codes.at) {
    code = eight ? extend_sign<8>(code) : extend_sign<4>(code);
  }
  const std::byte* const block = from.blocks + place.first / group_size * block_bytes(from.bits);
  float scale = 0.0f;
  __builtin_memcpy(&scale, __builtin_assume_aligned(block, scale_bytes), scale_bytes);
  return from_codes(codes, scale);
}

constexpr void sum_quantized_octet(const QuantizedSummands& from, const Numbers& into, const OctetPlace& place) {
  if (place.count == 0) return;
  FloatOctet sum{};
  if (from.arrays.continues) sum = load_floats({into.data, into.count, into.dtype}, place);
  for (std::size_t array = 0; array < from.arrays.arrays; ++array) {
    const FloatOctet added = load_quantized({from.bits, from.arrays.data[array]}, place);
    for (std::size_t i = 0; i < octet_size; ++i) {
      sum.at[i] = accumulated(sum.at[i], added.at[i], 1.0f);
    }
  }
  store_floats(into, place, sum);
}

}  // namespace ballast::kernels
