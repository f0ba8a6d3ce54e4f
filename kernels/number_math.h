// Small formulas on numbers that the other formulas share, the floating-point formats of buffers, and the formulas of
// accumulate and accumulate_stochastic. F and U are lanes, see simd/scalar.h.
#pragma once

#include <ballast/view.h>

#include "kernels/simd/scalar.h"

namespace ballast::kernels {

using simd::above;
using simd::add_where;
using simd::as_float;
using simd::below;
using simd::bits;
using simd::blend_halves;
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
using simd::Two;
using simd::zero_where;

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
  return zero_where(none_of(bits(x), U(0x7f800000u)), x);
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

// Conversions between fp16 and fp32, rounded to nearest, ties to even. They use fp32 arithmetic instead of the
// conversion instructions, so that every device gives the same bits, also for NaN.
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

// Adds noise below the kept bits. Cutting the bits below off then rounds up with the right probability. NaN stays NaN.
template <class F>
constexpr BitsOf<F> add_noise(F x, BitsOf<F> noise) {
  return add_where(is_number(x), bits(x), noise);
}

template <int bits, class U>
constexpr U extend_sign(U code) {
  constexpr std::uint32_t sign = 1u << (bits - 1);
  return (code ^ U(sign)) - U(sign);
}

// --- Pairs: 16-bit values are the halves of lanes, codes of 8 bits the low bytes of halves, and those of 4 bits the two halves of
// a low byte ---

template <class U>
constexpr U upper_halves(const Two<U>& x) {
  return blend_halves(shift_right<16>(x.a), x.b);
}

template <class U>
constexpr U lower_halves(const Two<U>& x) {
  return blend_halves(x.a, shift_left<16>(x.b));
}

template <int bits, class U>
constexpr U pack_low_bits(const Two<U>& codes) {
  if constexpr (bits == 8) return lower_halves(codes) & U(0x00ff00ffu);
  return ((codes.a & U(0xfu)) | shift_left<4>(codes.b)) & U(0xffu);
}
template <int bits, class U>
constexpr Two<U> unpack_low_bits(U codes) {
  if constexpr (bits == 8) return {codes & U(0xffu), shift_right<16>(codes)};
  return {codes & U(0xfu), shift_right<4>(codes)};
}

// --- The formats of buffers: types that decode a stored pattern to fp32 and round fp32 to a pattern ---

// `infinity` is the pattern of the exponent bits. A value with all of them set is infinite or NaN.
struct Fp32Format {
  using Stored = float;
  static constexpr std::uint32_t infinity = 0x7f800000u;
  template <class U>
  static constexpr auto decode(U pattern) {
    return as_float(pattern);
  }
  template <class F>
  static constexpr BitsOf<F> encode(F x) {
    return bits(x);
  }
};

struct Bf16Format {
  using Stored = std::uint16_t;
  static constexpr std::uint32_t infinity = 0x7f80u;
  template <class U>
  static constexpr auto decode(U pattern) {
    return from_bf16(pattern);
  }
  template <class F>
  static constexpr BitsOf<F> encode(F x) {
    return to_bf16(x);
  }
};

struct Fp16Format {
  using Stored = std::uint16_t;
  static constexpr std::uint32_t infinity = 0x7c00u;
  template <class U>
  static constexpr auto decode(U pattern) {
    return from_fp16(pattern);
  }
  template <class F>
  static constexpr BitsOf<F> encode(F x) {
    return to_fp16(x);
  }
};

// Calls body(Format{}) with the format of `dtype`, which must not be u8.
template <class Body>
constexpr decltype(auto) with_format(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::bf16: return body(Bf16Format{});
    case DType::fp16: return body(Fp16Format{});
    default: return body(Fp32Format{});
  }
}

// Replaces every NaN by the same one: the NaN that an operation gives depends on the order of its operands and on the
// device.
template <class F>
constexpr F one_nan(F x) {
  using U = BitsOf<F>;
  return as_float(select(is_nan(x), U(0x7fc00000u), bits(x)));
}

// --- Accumulation, of one element ---

// The sum is in fp32 and rounded once. If `into` is bf16 or fp16, storing the sum rounds a second time, as in torch.
template <class F>
constexpr F accumulated(F into, F from, F scale) {
  return one_nan(fma(scale, from, into));
}

// The bf16 pattern of the sum, rounded up or down by 16 of the random bits. A sum that bf16 can represent stays as it is.
template <class F>
constexpr BitsOf<F> accumulated_stochastic(F into, F from, BitsOf<F> random) {
  using U = BitsOf<F>;
  return shift_right<16>(add_noise(accumulated(into, from, F(1.0f)), random & U(0xffffu)));
}

}  // namespace ballast::kernels
