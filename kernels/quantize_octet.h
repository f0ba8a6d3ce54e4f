// Block quantization by one CUDA thread, which takes eight elements. The sixteen threads of a group share its largest
// magnitude.
#pragma once

#include "kernels/number_octet.h"
#include "kernels/quantize_pieces.h"
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

// --- Codes in memory: eight or four bytes an octet ---

template <class Byte>
constexpr void store_codes(Byte* codes, CodeBits code_bits, const OctetPlace& place, const Octet& octet) {
  auto* const bytes = reinterpret_cast<std::byte*>(codes);
  if (code_bits == CodeBits::eight) {
    store_octet_of<std::uint8_t>(bytes, place, octet);
  } else {
    store_octet_of<Nibble>(bytes, place, octet);
  }
}

// Loads codes with their signs extended to 32 bits.
template <class Byte>
constexpr Octet load_codes(const Byte* codes, CodeBits code_bits, const OctetPlace& place) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(codes);
  const bool eight = code_bits == CodeBits::eight;
  Octet octet = eight ? load_octet_of<std::uint8_t>(bytes, place) : load_octet_of<Nibble>(bytes, place);
  for (std::uint32_t& code : octet.at) {
    code = eight ? sign_extended(code) : extend_sign_of_4_bits(code);
  }
  return octet;
}

}  // namespace ballast::kernels
