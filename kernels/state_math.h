// How the state formats store a master parameter and its moments, and read them back.
//
//   format    master                                     moments
//   fp32      fp32                                       fp32
//   split     low 16 bits; the bf16 parameter is above   fp32
//   bf16      low 16 bits                                bf16, stochastic rounding
//   compact   8 bits below bf16, stochastic rounding     8-bit companded m and sqrt(v), a scale for each group
#pragma once

#include <ballast/state_format.h>

#include "kernels/number_math.h"

namespace ballast::kernels {

// --- The master parameter ---

// Returns the bf16 parameter in the upper half, rounded to nearest, ties away from zero. Together with the low half of
// the master it is exact: the low half alone tells whether the upper half was rounded up. With ties to even it would
// not. One value in 65,536 is a tie, and ties of both signs balance.
template <class F>
constexpr BitsOf<F> rounded_parameter(F master) {
  using U = BitsOf<F>;
  return select(is_number(master), bits(master) + U(0x8000u), bits(master));
}

template <class F>
constexpr BitsOf<F> to_bf16_parameter(F master) {
  return shift_right<16>(rounded_parameter(master));
}

// Returns the bf16 parameter in the upper half and the remainder below it: the low half of the master, unchanged.
template <class F>
constexpr BitsOf<F> split16(F master) {
  using U = BitsOf<F>;
  return rounded_parameter(master) ^ U(0x8000u);  // undoes in the low half the addition that rounded
}

// Adds the remainder, a signed number, to the parameter in the upper half.
template <class U>
constexpr auto join16(U halves) {
  return as_float((halves ^ U(0x8000u)) - U(0x8000u));
}

// Adds noise below the kept bits. Cutting the bits below off then rounds up with the right probability. NaN stays NaN.
template <class F>
constexpr BitsOf<F> add_noise(F x, BitsOf<F> noise) {
  return select(is_number(x), bits(x) + noise, bits(x));
}

// A bf16 parameter in the upper half, and 8 bits more of the master in the low byte.
template <class U>
struct Split8 {
  U parameter;
  U remainder;
};

template <class F>
constexpr Split8<BitsOf<F>> split8(F master, BitsOf<F> random) {
  using U = BitsOf<F>;
  const U noisy = add_noise(master, random & U(0xffu));
  return {select(is_number(master), noisy + U(0x8000u), noisy), shift_right<8>(noisy)};
}

// `signed_remainder` has its sign extended to 32 bits.
template <class U>
constexpr auto join8(U parameter, U signed_remainder) {
  return as_float(parameter + shift_left<8>(signed_remainder));
}

// --- Moments in bf16 ---

// The result is in the upper half.
template <class F>
constexpr BitsOf<F> to_bf16_stochastic(F x, BitsOf<F> random16) {
  return add_noise(x, random16);
}

// --- Moments in 8 bits ---
//
// Companding as in digital telephony (mu-law, mu = 255): a magnitude is scaled to [0, 2), 1/128 is added, and the
// leading bits of the sum as a float are stored. The exponent counts 8 segments, each twice as coarse as the one
// before, so small values keep their relative precision. The sum's exponent runs from 120 to 127, so its low three bits
// are enough, and encoding costs an addition and a shift.

inline constexpr std::uint32_t compand_base = 0x3c000000u;  // the pattern of 1/128, whose exponent is 120

// The largest value of a group is scaled to just below 31/16, the value of the highest 7-bit code, so that nothing
// overflows. A group of only subnormal values becomes zero.
constexpr float compand_factor(float largest) { return largest >= 0x1p-126f ? 0x1.edfff0p+0f / largest : 0.0f; }
constexpr float compand_scale(float largest) { return largest < 0x1p-126f ? 0.0f : largest * (128.0f / 247.0f); }

// Returns the leading bits of the sum's pattern, after adding noise below the `KeptBits` of the mantissa that are
// stored. `noise` has 23 - KeptBits bits.
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
  const U sign = shift_right<24>(bits(m));
  return sign ^ ((sign ^ size) & U(0x7fu));
}

// `signed_code` has its sign extended to 32 bits.
template <class F>
constexpr F expand_momentum(BitsOf<F> signed_code, F scale) {
  using U = BitsOf<F>;
  const U sum = (shift_left<19>(signed_code) | U(compand_base)) & U(0xbfffffffu);
  const U base = bits(scale * F(-0x1p-7f)) ^ (sum & U(0x80000000u));
  return fma(as_float(sum), scale, as_float(base));
}

// The root of the second moment has 8 bits; storing the byte cuts off the upper bits of the exponent. Code 0 is not
// used: the update divides by the root, and a small root that rounded to zero would give a huge step.
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
