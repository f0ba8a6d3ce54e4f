// Conversions between fp16 and fp32, rounded to nearest, ties to even. They use fp32 arithmetic instead of the
// conversion instructions, so that every device gives the same bits, also for NaN.
#pragma once

#include "kernels/number_math.h"

namespace ballast::kernels {

template <class U>
constexpr auto from_fp16(U half) {
  using F = decltype(as_float(U(0u)));
  const U sign = shift_left<16>(half & U(0x8000u));
  const U rest = shift_left<13>(half & U(0x7fffu));
  // Multiplying moves the exponent from fp16's bias to fp32's and makes subnormals normal, exactly.
  const U finite = bits(as_float(rest) * F(0x1p112f));
  const U special = rest | U(0x7f800000u);
  return as_float(sign | select(above(U(0x0f800000u), rest), finite, special));
}

template <class F>
constexpr BitsOf<F> to_fp16(F x) {
  using U = BitsOf<F>;
  const U sign = shift_right<16>(bits(x) & U(0x80000000u));
  const U size = bits(x) & U(0x7fffffffu);
  // Normal results: round at bit 13, then move the exponent. Values of 65,520 and above become infinity.
  const U odd = shift_right<13>(size) & U(1u);
  const U normal = shift_right<13>(size + U(0xfffu) + odd - U(0x38000000u));
  // Subnormal results: adding 0.5 makes the addition round at 2^-24, fp16's smallest step.
  const U subnormal = bits(as_float(size) + F(0.5f)) - U(0x3f000000u);
  const U finite = select(above(U(0x38800000u), size), subnormal, min(normal, U(0x7c00u)));
  return sign | select(is_nan(x), U(0x7e00u), finite);
}

}  // namespace ballast::kernels
