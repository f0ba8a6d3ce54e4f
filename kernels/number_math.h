// Small formulas on numbers that the other formulas share. F and U are lanes, see simd/scalar.h.
#pragma once

#include "kernels/simd/scalar.h"

namespace ballast::kernels {

using simd::above;
using simd::as_float;
using simd::below;
using simd::bits;
using simd::fma;
using simd::is_nan;
using simd::is_number;
using simd::max;
using simd::min;
using simd::none_of;
using simd::select;
using simd::shift_left;
using simd::shift_right;
using simd::sqrt;

template <class F>
using BitsOf = decltype(bits(F{}));

template <class F>
constexpr F magnitude(F x) {
  using U = BitsOf<F>;
  return as_float(bits(x) & U(0x7fffffffu));
}

// Makes values below the smallest normal number zero on every device: a decaying moment passes through that range on
// its way to zero, and arithmetic there is several times slower on CPUs.
template <class F>
constexpr F flush(F x) {
  using U = BitsOf<F>;
  return select(none_of(bits(x), U(0x7f800000u)), F(0.0f), x);
}

// bf16 is the upper half of fp32.
template <class U>
constexpr auto from_bf16(U half) {
  return as_float(shift_left<16>(half));
}

// Rounds to nearest, ties to even, as torch and the hardware do. A NaN stays a NaN: one mantissa bit is set, since its
// upper half might hold none.
template <class F>
constexpr BitsOf<F> to_bf16(F x) {
  using U = BitsOf<F>;
  const U pattern = bits(x);
  const U odd = shift_right<16>(pattern) & U(1u);
  const U rounded = shift_right<16>(pattern + U(0x7fffu) + odd);
  return select(is_nan(x), shift_right<16>(pattern) | U(0x40u), rounded);
}

}  // namespace ballast::kernels
