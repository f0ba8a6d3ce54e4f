// How the state formats store a master parameter and its moments, and read them back.
//
//   format    master                                     moments
//   fp32      fp32                                       fp32
//   split     low 16 bits; the bf16 parameter is above   fp32
//   bf16      low 16 bits                                bf16, stochastic rounding
//   compact   8 bits below bf16, stochastic rounding     8-bit codes of m and sqrt(v), a scale for each group
//   4bit      as compact                                 4-bit codes of m and sqrt(v), a scale for each group
//
// moment_code_math.h defines the codes.
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

}  // namespace ballast::kernels
