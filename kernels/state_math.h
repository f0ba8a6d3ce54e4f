// How the state formats store a master parameter and its moments, and read them back.
//
//   format    master                                     moments
//   fp32      fp32                                       fp32
//   split     low 16 bits; the bf16 parameter is above   fp32
//   bf16      low 16 bits                                bf16, stochastic rounding
//   compact   8 bits below bf16, stochastic rounding     8-bit codes of m and sqrt(v), a scale for each group
//   4bit      as compact                                 4-bit codes of m and sqrt(v), a scale for each group
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
  return add_where(is_number(master), bits(master), U(0x8000u));
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

// The same for pairs of low halves.
template <class U>
constexpr U remainders_of(U rounded) {
  return rounded ^ U(0x80008000u);
}

// Adds the remainder, a signed number, to the parameter in the upper half.
template <class U>
constexpr auto join16(U halves) {
  return as_float((halves ^ U(0x8000u)) - U(0x8000u));
}

// The same for pairs of parameters and pairs of remainders. A remainder of 8 bits is the upper byte of one of 16.
template <class U>
constexpr auto join_pairs(U parameters, U remainders) -> Two<decltype(as_float(parameters))> {
  const U moved = remainders ^ U(0x80008000u);
  return {as_float(blend_halves(moved, shift_left<16>(parameters)) - U(0x8000u)),
          as_float(blend_halves(shift_right<16>(moved), parameters) - U(0x8000u))};
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
  return {add_where(is_number(master), noisy, U(0x8000u)), shift_right<8>(noisy)};
}

// `signed_remainder` has its sign extended to 32 bits.
template <class U>
constexpr auto join8(U parameter, U signed_remainder) {
  return as_float(parameter + shift_left<8>(signed_remainder));
}

// --- The codes of moments ---
//
// The codes of m and of the root of v in formats compact and 4bit, rounded stochastically. Each code is a type with the same
// functions.
// `largest` is the largest magnitude of a group. It determines the group's scale, which is stored, and the factor that encodes.
// `nearest` are the "random" bits that round to the nearest code.
//
// Codes are encoded and decoded in pairs.

// Cuts the bits of two codes, which begin at bit `first` of x.a and of x.b, and packs them. `mask` has the bits of one code.
template <int bits_of_code, int first, std::uint32_t mask, class U>
constexpr U pack_codes(const Two<U>& x) {
  if constexpr (bits_of_code == 8) {
    return shift_right<first - 16>(upper_halves(x)) & U(mask << 16 | mask);
  } else {
    return (shift_right<first>(x.a) & U(mask)) | (shift_right<first - 4>(x.b) & U(mask << 4));
  }
}

// Moves each of two packed codes to bit `first` of the leading half of a lane, and sets the bits of `base`.
template <int bits_of_code, int first, std::uint32_t base, class U>
constexpr Two<U> unpack_codes(U codes) {
  const auto with_base = [](U moved, U bits) {
    if constexpr (base == 0) return moved;
    return moved | bits;
  };
  if constexpr (bits_of_code == 8) {
    const U moved = with_base(shift_left<first - 16>(codes), U(base | base >> 16));
    return {shift_left<16>(moved), moved & U(0xffff0000u)};
  } else {
    const Two<U> two = unpack_low_bits<bits_of_code>(codes);
    return {with_base(shift_left<first>(two.a), U(base)), with_base(shift_left<first>(two.b), U(base))};
  }
}

// A code alone is the first of a pair. The bits above it are not defined.
template <class Code>
struct SingleCode {
  template <class F>
  static constexpr BitsOf<F> encode(F x, F factor, BitsOf<F> random) {
    return Code::encode_pairs(Two<F>{x, F{}}, factor, Two<BitsOf<F>>{random, BitsOf<F>{}});
  }
  template <class F>
  static constexpr F decode(BitsOf<F> code, F scale) {
    return Code::decode_pairs(code, scale).a;
  }
};

// --- Companding ---
//
// The codes are those of digital telephony (mu-law, mu = 255): a magnitude is scaled to [0, 2), a base is added, and the leading
// bits of the sum as a float are stored. The exponent counts segments, each twice as coarse as the one before, so small values
// keep their relative precision. The base is 1/128 for 8 segments: the sum's exponent then runs from 120 to 127, so its
// low three bits are enough, and encoding costs an addition and a shift.

template <int SegmentBits, int MantissaBits, int MantissaBitsOfLargest = MantissaBits>
struct Companding {
  static constexpr int dropped_bits = 23 - MantissaBits;
  static constexpr std::uint32_t base_pattern = (128u - (1u << SegmentBits)) << 23;
  static constexpr float base = as_float(base_pattern);
  static constexpr float scaled_largest = 2.0f - 1.0f / (1 << MantissaBitsOfLargest) - base;

  // The largest value is scaled to just below the value of a code, so that nothing overflows. A group of only subnormal
  // values becomes zero.
  static constexpr float factor(float largest) {
    return largest >= 0x1p-126f ? (scaled_largest - 0x1p-20f) / largest : 0.0f;
  }
  static constexpr float scale(float largest) { return largest < 0x1p-126f ? 0.0f : largest * (1.0f / scaled_largest); }

 protected:
  // Returns the sum's pattern, whose bits above the dropped ones are the code below those of the base. `noise` has the dropped
  // bits.
  template <class F>
  static constexpr BitsOf<F> compress(F size, F factor, BitsOf<F> noise) {
    return bits(fma(size, factor, F(base))) + noise;
  }
  template <class F>
  static constexpr F expand(BitsOf<F> sum, F scale) {
    return fma(as_float(sum), scale, scale * F(-base));
  }
};

// The first moment: a sign above its companded magnitude.
template <int SegmentBits, int MantissaBits>
struct MomentumCode : Companding<SegmentBits, MantissaBits>, SingleCode<MomentumCode<SegmentBits, MantissaBits>> {
  using Magnitude = Companding<SegmentBits, MantissaBits>;
  static constexpr int bits_of_code = 1 + SegmentBits + MantissaBits;
  static constexpr std::uint32_t nearest = 1u << 31;

  template <class F>
  static constexpr BitsOf<F> encode_pairs(const Two<F>& m, F factor, const Two<BitsOf<F>>& random) {
    using U = BitsOf<F>;
    constexpr std::uint32_t sign = 1u << (bits_of_code - 1);
    const auto sum = [factor](F x, U drawn) {
      return Magnitude::compress(magnitude(x), factor, shift_right<32 - Magnitude::dropped_bits>(drawn));
    };
    return pack_codes<bits_of_code, Magnitude::dropped_bits, sign - 1>(Two<U>{sum(m.a, random.a), sum(m.b, random.b)}) |
           pack_codes<bits_of_code, 32 - bits_of_code, sign>(Two<U>{bits(m.a), bits(m.b)});
  }
  // The sign's place in the sum's pattern is a bit that is set in the base, so expanding ignores the sign.
  template <class F>
  static constexpr Two<F> decode_pairs(BitsOf<F> codes, F scale) {
    using U = BitsOf<F>;
    const Two<U> sums = unpack_codes<bits_of_code, Magnitude::dropped_bits, Magnitude::base_pattern>(codes);
    const Two<U> signs = unpack_codes<bits_of_code, 32 - bits_of_code, 0>(codes);
    const auto signed_value = [scale](U sum, U sign) {
      return as_float(bits(Magnitude::expand(sum, scale)) ^ (sign & U(0x80000000u)));
    };
    return {signed_value(sums.a, signs.a), signed_value(sums.b, signs.b)};
  }
};

// The root of the second moment. Code 0 is not used: the update divides by the root, and a small root that rounded to
// zero would give a huge step. The largest is scaled as that of a first moment of as many bits.
template <int SegmentBits, int MantissaBits>
struct CompandedRootCode : Companding<SegmentBits, MantissaBits, MantissaBits - 1>,
                           SingleCode<CompandedRootCode<SegmentBits, MantissaBits>> {
  using Size = Companding<SegmentBits, MantissaBits, MantissaBits - 1>;
  static constexpr int bits_of_code = SegmentBits + MantissaBits;
  static constexpr std::uint32_t nearest = 1u << (Size::dropped_bits - 1);

  template <class F>
  static constexpr BitsOf<F> encode_pairs(const Two<F>& root, F factor, const Two<BitsOf<F>>& random) {
    using U = BitsOf<F>;
    constexpr std::uint32_t one = 1u << Size::dropped_bits;
    const auto sum = [factor](F x, U drawn) {
      return max(Size::compress(x, factor, drawn & U(one - 1)), U(Size::base_pattern + one));
    };
    return pack_codes<bits_of_code, Size::dropped_bits, (1u << bits_of_code) - 1>(
        Two<U>{sum(root.a, random.a), sum(root.b, random.b)});
  }
  template <class F>
  static constexpr Two<F> decode_pairs(BitsOf<F> codes, F scale) {
    const auto sums = unpack_codes<bits_of_code, Size::dropped_bits, Size::base_pattern>(codes);
    return {Size::expand(sums.a, scale), Size::expand(sums.b, scale)};
  }
};

// --- Roots as small floats ---
//
// The noise of rounding matters with few bits: a root moves by a two-thousandth in a step, and its codes are a third apart.
// So the scale is a power of two, and the codes are the leading bits of floats: a new scale then moves values from codes
// to codes, and a root that a step does not change keeps its value exactly. There is no zero.

template <int ExponentBits, int MantissaBits>
struct FloatRootCode : SingleCode<FloatRootCode<ExponentBits, MantissaBits>> {
  static constexpr int bits_of_code = ExponentBits + MantissaBits;
  static constexpr int dropped_bits = 23 - MantissaBits;
  static constexpr std::uint32_t nearest = 1u << (dropped_bits - 1);
  static constexpr std::uint32_t smallest_pattern = (128u - (1u << ExponentBits)) << 23;

  // The smallest power of two by which the largest value, divided, is at most the value of the highest code. A group
  // with a root that is not finite gets NaN.
  static constexpr float scale(float largest) {
    const std::uint32_t pattern = bits(largest);
    if (pattern >= 0x7f800000u) return as_float(0x7fc00000u);
    return as_float((pattern + ((1u << dropped_bits) - 1)) & 0x7f800000u);
  }
  static constexpr float factor(float largest) { return as_float(0x7f000000u - bits(scale(largest))); }

  template <class F>
  static constexpr BitsOf<F> encode_pairs(const Two<F>& root, F factor, const Two<BitsOf<F>>& random) {
    using U = BitsOf<F>;
    const auto noisy = [factor](F x, U drawn) {
      return max(bits(x * factor) + (drawn & U((1u << dropped_bits) - 1)), U(smallest_pattern));
    };
    return pack_codes<bits_of_code, dropped_bits, (1u << bits_of_code) - 1>(
        Two<U>{noisy(root.a, random.a), noisy(root.b, random.b)});
  }
  template <class F>
  static constexpr Two<F> decode_pairs(BitsOf<F> codes, F scale) {
    const auto patterns = unpack_codes<bits_of_code, dropped_bits, smallest_pattern>(codes);
    return {as_float(patterns.a) * scale, as_float(patterns.b) * scale};
  }
};

// --- The codes of each format ---

template <StateFormat format>
struct MomentCodes;
template <>
struct MomentCodes<StateFormat::compact> {
  using Momentum = MomentumCode<3, 4>;
  using Root = CompandedRootCode<3, 5>;
};
template <>
struct MomentCodes<StateFormat::four_bit> {
  using Momentum = MomentumCode<3, 0>;
  using Root = FloatRootCode<3, 1>;
};

}  // namespace ballast::kernels
