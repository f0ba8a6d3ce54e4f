// Sixteen lanes with AVX-512 (F, BW, DQ, VL). scalar.h says what each function means. Only sources compiled for that
// instruction set may include this.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/simd/scalar.h"

namespace ballast::kernels::simd::avx512 {

struct F {
  __m512 v;
  F() = default;
  F(__m512 lanes) : v(lanes) {}
  explicit F(float x) : v(_mm512_set1_ps(x)) {}
};
struct U {
  __m512i v;
  U() = default;
  U(__m512i lanes) : v(lanes) {}
  explicit U(std::uint32_t x) : v(_mm512_set1_epi32(static_cast<int>(x))) {}
};
struct Mask {
  __mmask16 v;
};
struct Doubles {
  __m512d v = _mm512_setzero_pd();
};

inline F operator+(F a, F b) { return _mm512_add_ps(a.v, b.v); }
inline F operator-(F a, F b) { return _mm512_sub_ps(a.v, b.v); }
inline F operator*(F a, F b) { return _mm512_mul_ps(a.v, b.v); }
inline F operator/(F a, F b) { return _mm512_div_ps(a.v, b.v); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
inline F sqrt(F x) { return _mm512_sqrt_ps(x.v); }
inline F select(Mask take_a, F a, F b) { return _mm512_mask_blend_ps(take_a.v, b.v, a.v); }
inline Mask below(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline Mask is_nan(F x) { return {_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q)}; }
inline Mask is_number(F x) { return {_mm512_cmp_ps_mask(x.v, x.v, _CMP_ORD_Q)}; }

inline U bits(F x) { return _mm512_castps_si512(x.v); }
inline F as_float(U x) { return _mm512_castsi512_ps(x.v); }

inline U operator+(U a, U b) { return _mm512_add_epi32(a.v, b.v); }
inline U operator-(U a, U b) { return _mm512_sub_epi32(a.v, b.v); }
inline U operator*(U a, U b) { return _mm512_mullo_epi32(a.v, b.v); }
inline U operator&(U a, U b) { return _mm512_and_si512(a.v, b.v); }
inline U operator|(U a, U b) { return _mm512_or_si512(a.v, b.v); }
inline U operator^(U a, U b) { return _mm512_xor_si512(a.v, b.v); }
inline U select(Mask take_a, U a, U b) { return _mm512_mask_blend_epi32(take_a.v, b.v, a.v); }
inline U max(U a, U b) { return _mm512_max_epu32(a.v, b.v); }
inline U min(U a, U b) { return _mm512_min_epu32(a.v, b.v); }
inline Mask above(U a, U b) { return {_mm512_cmpgt_epu32_mask(a.v, b.v)}; }
inline Mask none_of(U x, U mask) { return {_mm512_testn_epi32_mask(x.v, mask.v)}; }
inline U add_where(Mask where, U a, U b) { return _mm512_mask_add_epi32(a.v, where.v, a.v, b.v); }
inline F zero_where(Mask where, F x) { return _mm512_mask_mov_ps(x.v, where.v, _mm512_setzero_ps()); }
inline U blend_halves(U low, U high) {
  return _mm512_ternarylogic_epi32(low.v, high.v, _mm512_set1_epi32(0xffff),
                                   0xe4);  // bit by bit, third ? first : second
}
inline Doubles operator+(Doubles a, Doubles b) { return {_mm512_add_pd(a.v, b.v)}; }
inline Doubles operator*(Doubles a, Doubles b) { return {_mm512_mul_pd(a.v, b.v)}; }
template <int Count>
U shift_left(U x) {
  return _mm512_slli_epi32(x.v, Count);
}
template <int Count>
U shift_right(U x) {
  return _mm512_srli_epi32(x.v, Count);
}

// The source of each 16-bit half of a result, for the permutations below.
struct alignas(64) Order {
  std::uint16_t from[32];
};
template <class From>
constexpr Order order(From from) {
  Order made{};
  for (unsigned i = 0; i < 32; ++i)
    made.from[i] = static_cast<std::uint16_t>(from(i));
  return made;
}
inline constexpr Order interleaved = order([](unsigned i) { return i / 2 + i % 2 * 32; });
inline constexpr Order even_then_odd = order([](unsigned i) { return i % 16 * 2 + i / 16; });

}  // namespace ballast::kernels::simd::avx512

namespace ballast::kernels::simd {

struct Avx512 {
  using F = avx512::F;
  using U = avx512::U;
  using Doubles = avx512::Doubles;
  static constexpr std::size_t width = 16;

  static F load(const float* from) { return _mm512_loadu_ps(from); }
  static U load(const std::uint32_t* from) { return _mm512_loadu_si512(from); }
  static U load(const std::uint16_t* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static U load(const std::uint8_t* from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void store(float* to, F x) { _mm512_storeu_ps(to, x.v); }
  static void store(std::uint32_t* to, U x) { _mm512_storeu_si512(to, x.v); }
  static void store(std::uint16_t* to, U x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(x.v));
  }
  static void store(std::uint8_t* to, U x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x.v));
  }
  static void stream(float* to, F x) {
    streamed([&] { _mm512_stream_ps(to, x.v); });
  }
  static void stream(std::uint16_t* to, U x) {
    streamed([&] { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(x.v)); });
  }
  static void finish_streams() { _mm_sfence(); }
  static U load_high(const std::uint16_t* high) {
    return _mm512_maskz_permutexvar_epi16(0xaaaaaaaa, take(avx512::interleaved), sixteen(high));
  }
  static U load_halves(const std::uint16_t* high, const std::uint16_t* low) {
    return _mm512_permutex2var_epi16(sixteen(low), take(avx512::interleaved), sixteen(high));
  }
  static void store_halves(std::uint16_t* high, std::uint16_t* low, U x) {
    const __m512i halves = _mm512_permutexvar_epi16(take(avx512::even_then_odd), x.v);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm512_castsi512_si256(halves));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm512_extracti64x4_epi64(halves, 1));
  }
  static U load_pairs(const std::uint16_t* from) { return _mm512_loadu_si512(from); }
  static U load_pairs(const std::uint8_t* from) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static Two<F> load_pairs(const float* from) {
    const __m512 first = _mm512_loadu_ps(from), second = _mm512_loadu_ps(from + width);
    const __m512i even = _mm512_slli_epi32(lane_numbers().v, 1);
    return {_mm512_permutex2var_ps(first, even, second),
            _mm512_permutex2var_ps(first, _mm512_or_si512(even, _mm512_set1_epi32(1)), second)};
  }
  static Two<F> in_order(const Two<F>& pairs) {
    const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return {_mm512_permutex2var_ps(pairs.a.v, first, pairs.b.v),
            _mm512_permutex2var_ps(pairs.a.v, _mm512_add_epi32(first, _mm512_set1_epi32(8)), pairs.b.v)};
  }
  static void store_pairs(std::uint16_t* to, U x) { _mm512_storeu_si512(to, x.v); }
  static void stream_pairs(std::uint16_t* to, U x) {
    streamed([&] { _mm512_stream_si512(reinterpret_cast<__m512i*>(to), x.v); });
  }
  static void store_half_bytes(std::uint8_t* to, U a, U b) {
    const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi64(order, _mm512_packus_epi16(a.v, b.v)));
  }
  static void store_lane_bytes(std::uint8_t* to, U a, U b) {
    store(to, a);
    store(to + width, b);
  }
  struct Table {
    __m512 values;
  };
  static Table table(const float* values) { return {_mm512_loadu_ps(values)}; }
  static F look_up(const Table& table, U index) { return _mm512_permutexvar_ps(index.v, table.values); }
  static U lane_numbers() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }
  static std::uint32_t max_of_lanes(U x) { return _mm512_reduce_max_epu32(x.v); }
  static Doubles load_doubles(const float* from) { return {_mm512_cvtps_pd(_mm256_loadu_ps(from))}; }
  static double sum_of_lanes(Doubles x) {
    const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(x.v), _mm512_extractf64x4_pd(x.v, 1));
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
  }

 private:
  static __m512i take(const avx512::Order& order) { return _mm512_load_si512(&order); }
  static __m512i sixteen(const std::uint16_t* from) {
    return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
};

}  // namespace ballast::kernels::simd
