// Four lanes with NEON, which every aarch64 processor has. scalar.h says what each function means.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels/simd/scalar.h"

namespace ballast::kernels::simd::neon {

struct F {
  float32x4_t v;
  F() = default;
  F(float32x4_t lanes) : v(lanes) {}
  explicit F(float x) : v(vdupq_n_f32(x)) {}
};
struct U {
  uint32x4_t v;
  U() = default;
  U(uint32x4_t lanes) : v(lanes) {}
  explicit U(std::uint32_t x) : v(vdupq_n_u32(x)) {}
};
struct Mask {
  uint32x4_t v;  // all bits of a lane, or none
};
struct Doubles {
  float64x2_t v[4]{vdupq_n_f64(0.0), vdupq_n_f64(0.0), vdupq_n_f64(0.0), vdupq_n_f64(0.0)};
};

inline F operator+(F a, F b) { return vaddq_f32(a.v, b.v); }
inline F operator-(F a, F b) { return vsubq_f32(a.v, b.v); }
inline F operator*(F a, F b) { return vmulq_f32(a.v, b.v); }
inline F operator/(F a, F b) { return vdivq_f32(a.v, b.v); }
inline F fma(F a, F b, F c) { return vfmaq_f32(c.v, a.v, b.v); }
inline F sqrt(F x) { return vsqrtq_f32(x.v); }
inline F select(Mask take_a, F a, F b) { return vbslq_f32(take_a.v, a.v, b.v); }
inline Mask below(F a, F b) { return {vcltq_f32(a.v, b.v)}; }
inline Mask is_number(F x) { return {vceqq_f32(x.v, x.v)}; }
inline Mask is_nan(F x) { return {vmvnq_u32(is_number(x).v)}; }

inline U bits(F x) { return vreinterpretq_u32_f32(x.v); }
inline F as_float(U x) { return vreinterpretq_f32_u32(x.v); }

inline U operator+(U a, U b) { return vaddq_u32(a.v, b.v); }
inline U operator-(U a, U b) { return vsubq_u32(a.v, b.v); }
inline U operator*(U a, U b) { return vmulq_u32(a.v, b.v); }
inline U operator&(U a, U b) { return vandq_u32(a.v, b.v); }
inline U operator|(U a, U b) { return vorrq_u32(a.v, b.v); }
inline U operator^(U a, U b) { return veorq_u32(a.v, b.v); }
inline U select(Mask take_a, U a, U b) { return vbslq_u32(take_a.v, a.v, b.v); }
inline U max(U a, U b) { return vmaxq_u32(a.v, b.v); }
inline U min(U a, U b) { return vminq_u32(a.v, b.v); }
inline Mask above(U a, U b) { return {vcgtq_u32(a.v, b.v)}; }
inline Mask none_of(U x, U mask) { return {vceqzq_u32(vandq_u32(x.v, mask.v))}; }
inline U add_where(Mask where, U a, U b) { return vaddq_u32(a.v, vandq_u32(b.v, where.v)); }
inline F zero_where(Mask where, F x) { return as_float(vbicq_u32(bits(x).v, where.v)); }
inline U blend_halves(U low, U high) { return vbslq_u32(vdupq_n_u32(0xffff), low.v, high.v); }
inline Doubles operator+(const Doubles& a, const Doubles& b) {
  Doubles sum;
  for (int i = 0; i < 4; ++i) {
    sum.v[i] = vaddq_f64(a.v[i], b.v[i]);
  }
  return sum;
}
inline Doubles operator*(const Doubles& a, const Doubles& b) {
  Doubles product;
  for (int i = 0; i < 4; ++i) {
    product.v[i] = vmulq_f64(a.v[i], b.v[i]);
  }
  return product;
}
template <int Count>
U shift_left(U x) {
  return vshlq_n_u32(x.v, Count);
}
template <int Count>
U shift_right(U x) {
  return vshrq_n_u32(x.v, Count);
}

}  // namespace ballast::kernels::simd::neon

namespace ballast::kernels::simd {

struct Neon {
  using F = neon::F;
  using U = neon::U;
  using Doubles = neon::Doubles;
  static constexpr std::size_t width = 4;

  static F load(const float* from) { return vld1q_f32(from); }
  static U load(const std::uint32_t* from) { return vld1q_u32(from); }
  static U load(const std::uint16_t* from) { return vmovl_u16(vld1_u16(from)); }
  static U load(const std::uint8_t* from) {
    std::uint32_t bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes))));
  }
  static void store(float* to, F x) { vst1q_f32(to, x.v); }
  static void store(std::uint32_t* to, U x) { vst1q_u32(to, x.v); }
  static void store(std::uint16_t* to, U x) { vst1_u16(to, vmovn_u32(x.v)); }
  static void store(std::uint8_t* to, U x) {
    const uint16x4_t halves = vmovn_u32(x.v);
    const uint8x8_t bytes = vmovn_u16(vcombine_u16(halves, halves));
    const std::uint32_t first = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
    __builtin_memcpy(to, &first, sizeof first);
  }
  // Stores past the caches have no intrinsics, and these processors need none: they do not read a line that is written whole.
  static void stream(float* to, F x) { store(to, x); }
  static void stream(std::uint16_t* to, U x) { store(to, x); }
  static void finish_streams() {}
  static U load_high(const std::uint16_t* high) { return vshll_n_u16(vld1_u16(high), 16); }
  static U load_halves(const std::uint16_t* high, const std::uint16_t* low) {
    return vorrq_u32(load_high(high).v, load(low).v);
  }
  static void store_halves(std::uint16_t* high, std::uint16_t* low, U x) {
    vst1_u16(high, vshrn_n_u32(x.v, 16));
    store(low, x);
  }
  static U load_pairs(const std::uint16_t* from) { return vreinterpretq_u32_u16(vld1q_u16(from)); }
  static U load_pairs(const std::uint8_t* from) { return vreinterpretq_u32_u16(vmovl_u8(vld1_u8(from))); }
  static Two<F> load_pairs(const float* from) {
    const float32x4x2_t pairs = vld2q_f32(from);
    return {pairs.val[0], pairs.val[1]};
  }
  static Two<F> in_order(const Two<F>& pairs) {
    return {vzip1q_f32(pairs.a.v, pairs.b.v), vzip2q_f32(pairs.a.v, pairs.b.v)};
  }
  static void store_pairs(std::uint16_t* to, U x) { vst1q_u16(to, vreinterpretq_u16_u32(x.v)); }
  static void stream_pairs(std::uint16_t* to, U x) { store_pairs(to, x); }
  static void store_half_bytes(std::uint8_t* to, U a, U b) {
    vst1q_u8(to, vuzp1q_u8(vreinterpretq_u8_u32(a.v), vreinterpretq_u8_u32(b.v)));
  }
  static void store_lane_bytes(std::uint8_t* to, U a, U b) {
    vst1_u8(to, vmovn_u16(vuzp1q_u16(vreinterpretq_u16_u32(a.v), vreinterpretq_u16_u32(b.v))));
  }
  using Table = uint8x16x4_t;
  static Table table(const float* values) { return vld1q_u8_x4(reinterpret_cast<const std::uint8_t*>(values)); }
  static F look_up(const Table& table, U index) {
    const U places = (index & U(0xfu)) * U(0x04040404u) + U(0x03020100u);  // of the four bytes of a value
    return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(places.v)));
  }
  static U lane_numbers() {
    static constexpr std::uint32_t numbers[] = {0, 1, 2, 3};
    return load(numbers);
  }
  static std::uint32_t max_of_lanes(U x) { return vmaxvq_u32(x.v); }
  static Doubles load_doubles(const float* from) {
    const float32x4_t low = vld1q_f32(from), high = vld1q_f32(from + width);
    return {{vcvt_f64_f32(vget_low_f32(low)), vcvt_high_f64_f32(low), vcvt_f64_f32(vget_low_f32(high)),
             vcvt_high_f64_f32(high)}};
  }
  static double sum_of_lanes(const Doubles& x) {
    return vaddvq_f64(vaddq_f64(vaddq_f64(x.v[0], x.v[2]), vaddq_f64(x.v[1], x.v[3])));
  }
};

}  // namespace ballast::kernels::simd
