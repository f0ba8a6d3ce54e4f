// A sum without rounding: threads, ranks and GPU atomics may add their parts in any order, and the result has the same
// bits. It is made for sums of squares of 128 fp32 values (sum_of_group() in array_walk.h): doubles that are zero or lie in
// [2^-300, 2^276).
//
// Such a sum is one long integer in units of 2^-352, stored as 20 bins of 32 bits each (a Kulisch accumulator). A bin
// is 64 bits wide, so carries can wait. An addition adds less than 2^32 to a bin, so 2^31 additions (the squares of
// 2^38 elements) fit between two calls of carry(). The bins that carry() leaves count as one addition, so up to 2^31
// ranks may add their sums as plain integers (an all-reduce) and then call carry().
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "kernels/number_math.h"

namespace ballast::kernels {

struct ExactSum {
  static constexpr int bin_count = 20;
  std::int64_t bins[bin_count]{};  // the least significant first
  std::int64_t infinite = 0;       // how many of the added values were infinite
  std::int64_t nan = 0;

  friend constexpr bool operator==(const ExactSum&, const ExactSum&) = default;
};
inline constexpr int exact_sum_words = ExactSum::bin_count + 2;
static_assert(sizeof(ExactSum) == 8 * exact_sum_words && std::is_trivially_copyable_v<ExactSum>,
              "ranks add these as an array of int64");

inline constexpr int exact_sum_unit = -352;

// The parts that a value adds to three bins, of which `first` is the lowest.
struct BinParts {
  int first = 0;
  std::uint32_t parts[3]{};
};

// `x` must be positive and finite.
constexpr BinParts split_into_bins(double x) {
  const auto pattern = std::bit_cast<std::uint64_t>(x);
  const std::uint64_t mantissa = (pattern & 0xfffffffffffffu) | 0x10000000000000u;
  const int position = static_cast<int>(pattern >> 52) - 1075 - exact_sum_unit;
  const int shift = position % 32;
  const std::uint64_t upper = (mantissa >> 32) << shift;
  const std::uint64_t lower = (mantissa & 0xffffffffu) << shift;
  const std::uint64_t middle = (lower >> 32) + (upper & 0xffffffffu);  // fewer than 33 bits: the two do not overlap
  return {
      position / 32,
      {static_cast<std::uint32_t>(lower), static_cast<std::uint32_t>(middle), static_cast<std::uint32_t>(upper >> 32)}};
}

constexpr bool is_infinite_or_nan(double x) { return (std::bit_cast<std::uint64_t>(x) >> 52 & 0x7ffu) == 0x7ffu; }

constexpr void add(ExactSum& sum, double x) {
  if (is_infinite_or_nan(x)) {
    (x != x ? sum.nan : sum.infinite) += 1;
  } else if (x != 0.0) {
    const BinParts piece = split_into_bins(x);
    for (int i = 0; i < 3; ++i) {
      sum.bins[piece.first + i] += piece.parts[i];
    }
  }
}

// Moves the bits above a bin's lower 32 into the next bin. Equal sums then have equal bins.
constexpr void carry(ExactSum& sum) {
  for (int i = 0; i + 1 < ExactSum::bin_count; ++i) {
    sum.bins[i + 1] += sum.bins[i] >> 32;
    sum.bins[i] &= 0xffffffff;
  }
}

// Each sum may have had up to 2^30 additions since its last carry().
constexpr void merge(ExactSum& into, const ExactSum& from) {
  for (int i = 0; i < ExactSum::bin_count; ++i) {
    into.bins[i] += from.bins[i];
  }
  into.infinite += from.infinite;
  into.nan += from.nan;
  carry(into);
}

constexpr double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

// Not std::countl_zero(): it calls a function of the host compiler, which nvcc leaves out of device code without a word.
constexpr int leading_zeros(std::uint64_t x) {
  int zeros = 0;
  for (int half = 32; half > 0; half /= 2) {
    if (x >> (64 - half) == 0) zeros += half, x <<= half;
  }
  return zeros;  // 63 if no bit is set
}

// Returns the sum, rounded once to nearest, ties to even. It is NaN if a NaN was added, else infinite if an infinity
// was.
constexpr double value(const ExactSum& sum) {
  if (sum.nan > 0 || sum.infinite > 0) {
    return std::bit_cast<double>(sum.nan > 0 ? std::uint64_t{0x7ff8000000000000u} : std::uint64_t{0x7ff0000000000000u});
  }
  ExactSum whole = sum;
  carry(whole);
  int top = ExactSum::bin_count - 1;
  while (top > 0 && whole.bins[top] == 0) {
    --top;
  }
  const auto bin = [&whole](int i) { return i < 0 ? std::uint64_t{0} : static_cast<std::uint64_t>(whole.bins[i]); };
  if (bin(top) == 0) {
    return 0.0;
  }
  // Take the leading 64 bits; the last one also says whether any bit below it is set. That is 11 bits more than a
  // double has, so the conversion rounds the whole sum correctly.
  const int free = leading_zeros(bin(top));  // the sign bit of the bin makes it at least 1
  const std::uint64_t below = bin(top - 1) << 32 | bin(top - 2);
  bool inexact = below << free != 0;
  for (int i = 0; i < top - 2; ++i) {
    inexact = inexact || bin(i) != 0;
  }
  const std::uint64_t leading = bin(top) << free | below >> (64 - free) | (inexact ? 1u : 0u);
  return static_cast<double>(leading) * power_of_two(32 * top + exact_sum_unit - free);
}

// --- The division of a matrix by its norm, before it is orthogonalized ---

struct NormBound {
  float factor = 1.0f;  // multiplies the norm
  float least = 0.0f;   // what a smaller norm counts as
};

// The norm is rounded to fp32 once. That of a matrix with a NaN is NaN.
constexpr float divisor(const ExactSum& squares, const NormBound& bound) {
  const float norm = static_cast<float>(::sqrt(value(squares))) * bound.factor;
  return norm < bound.least ? bound.least : norm;
}

}  // namespace ballast::kernels
