// Block quantization by one CUDA thread, which takes eight elements. The sixteen threads of a group share its largest
// magnitude.
#pragma once

#include "kernels/number_octet.h"
#include "kernels/quantize_math.h"
#include "kernels/random_math.h"

namespace ballast::kernels {

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
    code = eight ? sign_extended(code) : extend_sign_of_4_bits(code);
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
