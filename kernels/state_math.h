// How the state formats store a master parameter and its moments, and read them back.
//
//   format    master                                     moments
//   fp32      fp32                                       fp32
//   split     low 16 bits; the bf16 parameter is above   fp32
//   bf16      low 16 bits                                bf16, stochastic rounding
//   compact   8 bits below bf16, stochastic rounding     8-bit companded m and sqrt(v), a scale for each group
#pragma once

#include "kernels/number_math.h"

namespace ballast::kernels {

// Elements that share a scale. Shards, tiles and runs start at multiples of it, so that a group has one owner.
inline constexpr std::size_t group_size = 128;

// --- The master parameter ---

// Nearest, a tie away from zero. Together with the low half this is exact: the low half alone tells whether the upper
// one was rounded up, which with ties to even it does not. One value in 65,536 is a tie, and the sign makes it fair.
template <class F>
constexpr BitsOf<F> to_bf16_parameter(F master) {
  using U = BitsOf<F>;
  const U pattern = bits(master);
  return shift_right<16>(select(is_nan(master), pattern | U(0x400000u), pattern + U(0x8000u)));
}

template <class F>
constexpr BitsOf<F> remainder16(F master) {
  using U = BitsOf<F>;
  return bits(master) & U(0xffffu);
}

// The remainder comes with its sign extended to 32 bits.
template <class U>
constexpr auto join16(U parameter, U signed_remainder) {
  return as_float(shift_left<16>(parameter) + signed_remainder);
}

// Adds noise below the bits that are kept; cutting the rest off then rounds up as often as it should. NaN stays NaN.
template <class F>
constexpr F add_noise(F x, BitsOf<F> noise) {
  return as_float(select(is_nan(x), bits(x), bits(x) + noise));
}

// A master of which the upper 24 bits are kept: they are exactly what join8 gives back.
template <class F>
constexpr F round_to_24_bits(F master, BitsOf<F> random) {
  using U = BitsOf<F>;
  return add_noise(master, random & U(0xffu));
}

template <class F>
constexpr BitsOf<F> remainder8(F master) {
  return shift_right<8>(bits(master));  // stored as a byte, which cuts the rest off
}

template <class U>
constexpr auto join8(U parameter, U signed_remainder) {
  return as_float(shift_left<16>(parameter) + shift_left<8>(signed_remainder));
}

// --- Moments in bf16 ---

template <class F>
constexpr BitsOf<F> to_bf16_stochastic(F x, BitsOf<F> random16) {
  return shift_right<16>(bits(add_noise(x, random16)));
}

// --- Moments in 8 bits ---
//
// Companding as in digital telephony (mu-law, mu = 255): a magnitude is scaled to [0, 2), 1/128 is added, and the leading
// bits of the sum as a float are stored. Its exponent counts 8 segments, each twice as coarse as the one before, so small
// values keep their relative precision. The sum's exponent runs from 120 to 127, so its low three bits are enough, and
// encoding costs an addition and a shift.

inline constexpr std::uint32_t compand_base = 0x3c000000u;  // the pattern of 1/128, whose exponent is 120

// The largest of a group comes just below 31/16, the value of the highest code of 7 bits, so that nothing overflows.
constexpr float compand_factor(float largest) { return largest > 0.0f ? 0x1.edfff0p+0f / largest : 0.0f; }
constexpr float compand_scale(float largest) { return largest * (128.0f / 247.0f); }

// The sum's pattern with noise below the `KeptBits` of the mantissa that are stored. `noise` has 23 - KeptBits bits.
template <int KeptBits, class F>
constexpr BitsOf<F> compand(F size, F factor, BitsOf<F> noise) {
  return shift_right<23 - KeptBits>(bits(fma(size, factor, F(0x1p-7f))) + noise);
}

template <int KeptBits, class F>
constexpr F expand(BitsOf<F> code, F scale) {
  using U = BitsOf<F>;
  return fma(as_float(shift_left<23 - KeptBits>(code) | U(compand_base)), scale, scale * F(-0x1p-7f));
}

// The first moment: a sign and 7 bits.
template <class F>
constexpr BitsOf<F> compand_momentum(F m, F factor, BitsOf<F> random) {
  using U = BitsOf<F>;
  const U size = compand<4>(magnitude(m), factor, shift_right<13>(random));
  return (size & U(0x7fu)) | (shift_right<24>(bits(m)) & U(0x80u));
}

template <class F>
constexpr F expand_momentum(BitsOf<F> code, F scale) {
  using U = BitsOf<F>;
  const F size = expand<4>(code, scale);  // the sign lies where the base has a bit already
  return as_float(bits(size) | (shift_left<24>(code) & U(0x80000000u)));
}

// The root of the second moment: 8 bits; storing the byte cuts the upper bits of the exponent off. Code 0 is not used:
// the update divides by the root, and a small one rounded to zero would make a huge step.
template <class F>
constexpr BitsOf<F> compand_root(F root, F factor, BitsOf<F> random) {
  using U = BitsOf<F>;
  return max(compand<5>(root, factor, random & U(0x3ffffu)), U((compand_base >> 18) + 1u));
}

template <class F>
constexpr F expand_root(BitsOf<F> code, F scale) {
  return expand<5>(code, scale);
}

}  // namespace ballast::kernels
