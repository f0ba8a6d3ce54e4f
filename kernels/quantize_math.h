// Block quantization, symmetric about zero: 8 or 4 bits a value, and one fp32 scale for each group of elements. The end of this
// file says how a block lies in memory.
//
// - The largest magnitude of a group gets the code 127 (8 bits) or 7 (4 bits). A code stands for code * scale, which
//   lies within half a step of the encoded value (scale / 2, and 2^-14 of that for the rounding of the arithmetic). A
//   stochastic code lies within one step, and is right on average.
// - Zero stays zero.
// - A group whose largest magnitude is below 2^-119 is stored as zeros with scale 0, because its scale would be
//   subnormal.
// - A group that holds a NaN or an infinity is stored with scale NaN and codes 0, so all of it reads as NaN. One bad
//   value is thus never lost, and loss scaling sees it.
#pragma once

#include "kernels/number_math.h"
#include "kernels/numbers.h"
#include "kernels/state_math.h"

namespace ballast::kernels {

enum class CodeBits : std::uint8_t { eight, four };

constexpr int largest_code(CodeBits bits) { return bits == CodeBits::eight ? 127 : 7; }

// Rounding to nearest, or stochastic rounding by random bits that belong to the element (random_math.h).
struct CodeRounding {
  bool stochastic = false;
  std::uint64_t stream = 0;
  std::uint64_t first_index = 0;  // the first element's index in its unit, a multiple of the group size
};

// `factor` converts values to codes, `scale` converts codes to values.
struct GroupScale {
  float factor = 0.0f;
  float scale = 0.0f;
};

inline constexpr std::uint32_t smallest_to_quantize = 0x04000000u;  // the pattern of 2^-119

// Returns the scale of a group whose largest magnitude has the pattern `largest`. Patterns of magnitudes compare as
// their values do, and the patterns of NaNs lie above infinity's.
constexpr GroupScale group_scale(std::uint32_t largest, CodeBits code_bits) {
  const auto codes = static_cast<float>(largest_code(code_bits));
  if (largest < smallest_to_quantize) {
    return {0.0f, 0.0f};
  }
  if (largest >= 0x7f800000u) {
    return {0.0f, as_float(0x7fc00000u)};
  }
  return {codes / as_float(largest), as_float(largest) / codes};
}

// Adding this makes the sum's last bit worth 1. The addition then rounds to a whole number, ties to even, and the low
// bits of the sum's pattern are that number in two's complement.
inline constexpr float whole_numbers = 0x1.8p23f;
inline constexpr std::uint32_t whole_number_zero = 0x4b400000u;  // its pattern

// Only the low bits of the following three results are the code. Values that are not finite may give any code, because
// their groups store zeros.
template <class U>
constexpr U limit_code(U sum, U largest) {
  return min(max(sum, U(whole_number_zero) - largest), U(whole_number_zero) + largest);
}

template <class F>
constexpr BitsOf<F> to_nearest_code(F x, F factor, BitsOf<F> largest) {
  return limit_code(bits(fma(x, factor, F(whole_numbers))), largest);
}

template <class F>
constexpr BitsOf<F> to_stochastic_code(F x, F factor, F noise, BitsOf<F> largest) {
  return limit_code(bits(fma(x, factor, noise) + F(whole_numbers)), largest);
}

// Returns noise for a stochastic code: uniform between -1/2 and 1/2, made of the upper 16 bits. It is coarse enough
// that a whole number keeps its value.
template <class U>
constexpr auto noise_of(U random) {
  using F = decltype(as_float(random));
  return as_float((shift_right<9>(random) & U(0x7fff80u)) | U(0x3f800040u)) - F(1.5f);
}

// `code` has its sign extended to 32 bits.
template <class U>
constexpr auto from_code(U code, decltype(as_float(U{})) scale) {
  using F = decltype(as_float(code));
  return one_nan((as_float(code + U(whole_number_zero)) - F(whole_numbers)) * scale);
}

// Quantized values in memory, as the walks take them: blocks, one for each group of elements. They are plain structs, see
// numbers.h.
// A block is the group's scale, in fp32, and then its codes. Codes of 4 bits lie two in a byte, the first in the lower half. A
// last, incomplete group has a block of full size; its codes past the last element are zero.
inline constexpr std::size_t scale_bytes = sizeof(float);
constexpr std::size_t group_code_bytes(CodeBits bits) { return bits == CodeBits::eight ? group_size : group_size / 2; }
constexpr std::size_t block_bytes(CodeBits bits) { return scale_bytes + group_code_bytes(bits); }

// Blocks begin at a multiple of 4 bytes.
struct QuantizedPiece {
  CodeBits bits = CodeBits::eight;
  std::byte* blocks = nullptr;
};
struct ConstQuantizedPiece {
  CodeBits bits = CodeBits::eight;
  const std::byte* blocks = nullptr;
};

// Quantized arrays that are added element by element, in order. `arrays.count` counts elements.
struct QuantizedSummands {
  Summands arrays{};
  CodeBits bits = CodeBits::eight;
};

}  // namespace ballast::kernels
