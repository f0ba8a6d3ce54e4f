// The values of the patterns of the floating-point formats, computed from the definition in double: slow, and as plain
// as possible.
#pragma once

#include <ballast/view.h>

#include <cmath>
#include <limits>

namespace ballast::kernels {

struct FormatShape {
  int mantissa_bits;
  int exponent_bits;
};

inline FormatShape shape_of(DType dtype) {
  switch (dtype) {
    case DType::bf16: return {7, 8};
    case DType::fp16: return {10, 5};
    default: return {23, 8};
  }
}

inline double value_of(DType dtype, std::uint32_t pattern) {
  const auto [mantissa_bits, exponent_bits] = shape_of(dtype);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int top = (1 << exponent_bits) - 1;
  const auto mantissa = static_cast<int>(pattern & ((1u << mantissa_bits) - 1));
  const auto exponent = static_cast<int>(pattern >> mantissa_bits) & top;
  const bool negative = (pattern >> (mantissa_bits + exponent_bits) & 1) != 0;
  double size = 0;
  if (exponent == top) {
    size = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    size = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    size = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return negative ? -size : size;
}

// Returns the pattern nearest to x, and the even one of two equally near. Above the largest number it is infinity. Not
// for NaN.
inline std::uint32_t nearest_pattern(DType dtype, double x) {
  const auto [mantissa_bits, exponent_bits] = shape_of(dtype);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const std::uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  const std::uint32_t sign = std::signbit(x) ? 1u << (mantissa_bits + exponent_bits) : 0u;
  const double size = std::abs(x);
  if (std::isinf(size)) {
    return sign | infinity;
  }
  const int exponent = size == 0 ? 1 - bias : std::max(std::ilogb(size), 1 - bias);
  const double steps = std::nearbyint(std::ldexp(size, mantissa_bits - exponent));  // size in steps at this exponent
  // Count from the first pattern with this exponent. Rounding up to the next power of two gives that power's pattern.
  const auto first = static_cast<std::uint32_t>(exponent + bias - 1) << mantissa_bits;
  const double pattern = first + steps;
  return sign | (pattern >= infinity ? infinity : static_cast<std::uint32_t>(pattern));
}

}  // namespace ballast::kernels
