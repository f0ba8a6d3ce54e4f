// The floating-point formats of buffers, as types that decode a stored pattern to fp32 and round fp32 to a pattern.
#pragma once

#include <ballast/view.h>

#include "kernels/number_math.h"

namespace ballast::kernels {

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

}  // namespace ballast::kernels
