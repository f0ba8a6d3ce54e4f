// Eight lanes with AVX2 and FMA. scalar.h says what each function means. Only sources compiled for that instruction set
// may include this.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/simd/scalar.h"

namespace ballast::kernels::simd::avx2 {

struct F {
  __m256 v;
  F() = default;
  F(__m256 lanes) : v(lanes) {}
  explicit F(float x) : v(_mm256_set1_ps(x)) {}
};
struct U {
  __m256i v;
  U() = default;
  U(__m256i lanes) : v(lanes) {}
  explicit U(std::uint32_t x) : v(_mm256_set1_epi32(static_cast<int>(x))) {}
};
struct Mask {
  __m256 v;  // all bits of a lane, or none
};
struct Doubles {
  __m256d low = _mm256_setzero_pd();
  __m256d high = _mm256_setzero_pd();
};

inline F operator+(F a, F b) { return _mm256_add_ps(a.v, b.v); }
inline F operator-(F a, F b) { return _mm256_sub_ps(a.v, b.v); }
inline F operator*(F a, F b) { return _mm256_mul_ps(a.v, b.v); }
inline F operator/(F a, F b) { return _mm256_div_ps(a.v, b.v); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a.v, b.v, c.v); }
inline F sqrt(F x) { return _mm256_sqrt_ps(x.v); }
inline F select(Mask take_a, F a, F b) { return _mm256_blendv_ps(b.v, a.v, take_a.v); }
inline Mask below(F a, F b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
inline Mask is_nan(F x) { return {_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q)}; }
inline Mask is_number(F x) { return {_mm256_cmp_ps(x.v, x.v, _CMP_ORD_Q)}; }

inline U bits(F x) { return _mm256_castps_si256(x.v); }
inline F as_float(U x) { return _mm256_castsi256_ps(x.v); }

inline U operator+(U a, U b) { return _mm256_add_epi32(a.v, b.v); }
inline U operator-(U a, U b) { return _mm256_sub_epi32(a.v, b.v); }
inline U operator*(U a, U b) { return _mm256_mullo_epi32(a.v, b.v); }
inline U operator&(U a, U b) { return _mm256_and_si256(a.v, b.v); }
inline U operator|(U a, U b) { return _mm256_or_si256(a.v, b.v); }
inline U operator^(U a, U b) { return _mm256_xor_si256(a.v, b.v); }
inline U select(Mask take_a, U a, U b) { return _mm256_blendv_epi8(b.v, a.v, _mm256_castps_si256(take_a.v)); }
inline U max(U a, U b) { return _mm256_max_epu32(a.v, b.v); }
inline U min(U a, U b) { return _mm256_min_epu32(a.v, b.v); }
inline Mask above(U a, U b) {  // there is no unsigned comparison: flip the top bits and compare signed
  const __m256i top = _mm256_set1_epi32(INT32_MIN);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_xor_si256(a.v, top), _mm256_xor_si256(b.v, top)))};
}
inline Mask none_of(U x, U mask) {
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(x.v, mask.v), _mm256_setzero_si256()))};
}
inline U add_where(Mask where, U a, U b) {
  return _mm256_add_epi32(a.v, _mm256_and_si256(b.v, _mm256_castps_si256(where.v)));
}
inline F zero_where(Mask where, F x) { return _mm256_andnot_ps(where.v, x.v); }
inline U blend_halves(U low, U high) { return _mm256_blend_epi16(low.v, high.v, 0xaa); }
inline Doubles operator+(Doubles a, Doubles b) { return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)}; }
inline Doubles operator*(Doubles a, Doubles b) { return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)}; }
template <int Count>
U shift_left(U x) {
  return _mm256_slli_epi32(x.v, Count);
}
template <int Count>
U shift_right(U x) {
  return _mm256_srli_epi32(x.v, Count);
}

}  // namespace ballast::kernels::simd::avx2

namespace ballast::kernels::simd {

struct Avx2 {
  using F = avx2::F;
  using U = avx2::U;
  using Doubles = avx2::Doubles;
  static constexpr std::size_t width = 8;

  static F load(const float* from) { return _mm256_loadu_ps(from); }
  static U load(const std::uint32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static U load(const std::uint16_t* from) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static U load(const std::uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
  static void store(float* to, F x) { _mm256_storeu_ps(to, x.v); }
  static void store(std::uint32_t* to, U x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x.v); }
  static void store(std::uint16_t* to, U x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), low_halves(x)); }
  static void store(std::uint8_t* to, U x) {
    const __m128i halves = _mm_and_si128(low_halves(x), _mm_set1_epi16(0xff));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
  }
  static void stream(float* to, F x) {
    streamed([&] { _mm256_stream_ps(to, x.v); });
  }
  static void stream(std::uint16_t* to, U x) {
    streamed([&] { _mm_stream_si128(reinterpret_cast<__m128i*>(to), low_halves(x)); });
  }
  static void finish_streams() { _mm_sfence(); }
  static U load_high(const std::uint16_t* high) { return shift_left<16>(load(high)); }
  static U load_halves(const std::uint16_t* high, const std::uint16_t* low) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high));
    const __m128i l = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
    return _mm256_set_m128i(_mm_unpackhi_epi16(l, h), _mm_unpacklo_epi16(l, h));
  }
  static void store_halves(std::uint16_t* high, std::uint16_t* low, U x) {
    const __m256i halves = halves_apart(x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm256_castsi256_si128(halves));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm256_extracti128_si256(halves, 1));
  }
  static U load_pairs(const std::uint16_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static U load_pairs(const std::uint8_t* from) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static Two<F> load_pairs(const float* from) {
    const __m256 first = _mm256_loadu_ps(from), second = _mm256_loadu_ps(from + width);
    const auto ordered = [](__m256 x) {
      return F(_mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), _MM_SHUFFLE(3, 1, 2, 0))));
    };
    return {ordered(_mm256_shuffle_ps(first, second, _MM_SHUFFLE(2, 0, 2, 0))),
            ordered(_mm256_shuffle_ps(first, second, _MM_SHUFFLE(3, 1, 3, 1)))};
  }
  static Two<F> in_order(const Two<F>& pairs) {
    const __m256 low = _mm256_unpacklo_ps(pairs.a.v, pairs.b.v), high = _mm256_unpackhi_ps(pairs.a.v, pairs.b.v);
    return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
  }
  static void stream_pairs(std::uint16_t* to, U x) {
    streamed([&] { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), x.v); });
  }
  static void store_pairs(std::uint16_t* to, U x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x.v); }
  static void store_half_bytes(std::uint8_t* to, U a, U b) {
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(a.v, b.v), _MM_SHUFFLE(3, 1, 2, 0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
  }
  static void store_lane_bytes(std::uint8_t* to, U a, U b) {
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(a.v, b.v), _MM_SHUFFLE(3, 1, 2, 0));
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
  }
  struct Table {
    __m256 low, high;
  };
  static Table table(const float* values) { return {_mm256_loadu_ps(values), _mm256_loadu_ps(values + width)}; }
  static F look_up(const Table& table, U index) {
    const __m256 top_bit = _mm256_castsi256_ps(_mm256_slli_epi32(index.v, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index.v), _mm256_permutevar8x32_ps(table.high, index.v),
                            top_bit);
  }
  static U lane_numbers() { return _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0); }
  static std::uint32_t max_of_lanes(U x) {
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(x.v), _mm256_extracti128_si256(x.v, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(1, 0, 3, 2)));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(2, 3, 0, 1)));
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(m));
  }
  static Doubles load_doubles(const float* from) {
    return {_mm256_cvtps_pd(_mm_loadu_ps(from)), _mm256_cvtps_pd(_mm_loadu_ps(from + 4))};
  }
  static double sum_of_lanes(Doubles x) {
    const __m256d four = _mm256_add_pd(x.low, x.high);
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
  }

 private:
  // Returns all lower halves, then all upper halves.
  static __m256i halves_apart(U x) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                           0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(x.v, order), _MM_SHUFFLE(3, 1, 2, 0));
  }
  static __m128i low_halves(U x) {
    const __m256i masked = _mm256_and_si256(x.v, _mm256_set1_epi32(0xffff));  // packus saturates signed numbers
    const __m256i packed = _mm256_packus_epi32(masked, masked);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0)));
  }
};

}  // namespace ballast::kernels::simd
