// One lane: the vocabulary in which every formula (*_math.h) is written, for plain floats.
//
// A formula is a template over F (float lanes) and U (their 32-bit patterns). Here F is float and U is uint32_t, for
// the scalar CPU walk and every CUDA thread. neon.h, avx2.h and avx512.h define the same functions on 4, 8 and 16 lanes. All
// functions are IEEE operations rounded once, so a formula gives the same bits on any lanes. They are constexpr because
// nvcc then compiles them for the GPU as well.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace ballast::kernels::simd {

constexpr std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }
constexpr float as_float(std::uint32_t x) { return std::bit_cast<float>(x); }

constexpr float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
constexpr float sqrt(float x) { return ::sqrtf(x); }

constexpr float select(bool take_a, float a, float b) { return take_a ? a : b; }
constexpr std::uint32_t select(bool take_a, std::uint32_t a, std::uint32_t b) { return take_a ? a : b; }

// Bit patterns compare as unsigned numbers.
constexpr std::uint32_t max(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }
constexpr std::uint32_t min(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }
constexpr bool above(std::uint32_t a, std::uint32_t b) { return a > b; }
constexpr bool below(float a, float b) { return a < b; }
constexpr bool is_nan(float x) { return x != x; }
constexpr bool is_number(float x) { return x == x; }
constexpr bool none_of(std::uint32_t x, std::uint32_t mask) { return (x & mask) == 0; }
constexpr std::uint32_t add_where(bool where, std::uint32_t a, std::uint32_t b) { return where ? a + b : a; }
constexpr float zero_where(bool where, float x) { return where ? 0.0f : x; }
constexpr std::uint32_t blend_halves(std::uint32_t low, std::uint32_t high) {
  return (low & 0xffffu) | (high & 0xffff0000u);
}

template <int Count>
constexpr std::uint32_t shift_left(std::uint32_t x) {
  return x << Count;
}
template <int Count>
constexpr std::uint32_t shift_right(std::uint32_t x) {
  return x >> Count;
}

// Eight double lanes for any width of F, so that a sum in double has the same order on every instruction set.
struct EightDoubles {
  double lanes[8]{};
};
constexpr EightDoubles operator+(const EightDoubles& a, const EightDoubles& b) {
  EightDoubles sum;
  for (int i = 0; i < 8; ++i) {
    sum.lanes[i] = a.lanes[i] + b.lanes[i];
  }
  return sum;
}
constexpr EightDoubles operator*(const EightDoubles& a, const EightDoubles& b) {
  EightDoubles product;
  for (int i = 0; i < 8; ++i) {
    product.lanes[i] = a.lanes[i] * b.lanes[i];
  }
  return product;
}

// Two vectors. Small values are accessed in pairs: `a` has the elements at even positions and `b` those after them. Then 16-bit
// values are the halves of 32-bit lanes, which takes fewer shifts and permutations than vectors in the order of memory.
template <class T>
struct Two {
  T a;
  T b;
};

// Calls store(), which bypasses the caches. Without the empty asm Clang merges it with an ordinary store of another branch, which
// does not.
template <class Store>
void streamed(const Store& store) {
  store();
  asm volatile("");
}

// Memory accesses and lane numbers. Walks need these; formulas do not.
struct Scalar {
  using F = float;
  using U = std::uint32_t;
  using Doubles = EightDoubles;
  static constexpr std::size_t width = 1;

  static F load(const float* from) { return *from; }
  static U load(const std::uint32_t* from) { return *from; }
  static U load(const std::uint16_t* from) { return *from; }
  static U load(const std::uint8_t* from) { return *from; }
  static void store(float* to, F x) { *to = x; }
  static void store(std::uint32_t* to, U x) { *to = x; }
  static void store(std::uint16_t* to, U x) { *to = static_cast<std::uint16_t>(x); }  // the low half
  static void store(std::uint8_t* to, U x) { *to = static_cast<std::uint8_t>(x); }    // the low byte
  // Stores past the caches, to addresses that are multiples of the bytes written.
  static void stream(float* to, F x) { store(to, x); }
  static void stream(std::uint16_t* to, U x) { store(to, x); }
  static void finish_streams() {}  // ends a walk that streams: orders its stores before later ones
  // These access a pattern whose upper half lies at `high`. Its lower half lies at `low`, or is zero.
  static U load_high(const std::uint16_t* high) { return U{*high} << 16; }
  static U load_halves(const std::uint16_t* high, const std::uint16_t* low) { return U{*high} << 16 | *low; }
  static void store_halves(std::uint16_t* high, std::uint16_t* low, U x) {
    store(high, x >> 16);
    store(low, x);
  }
  // Pairs: 2 * width values, those at even positions in the lower halves of the lanes.
  static U load_pairs(const std::uint16_t* from) { return U{from[0]} | U{from[1]} << 16; }
  static U load_pairs(const std::uint8_t* from) { return U{from[0]} | U{from[1]} << 16; }
  static Two<F> load_pairs(const float* from) { return {from[0], from[1]}; }
  static Two<F> in_order(const Two<F>& pairs) { return pairs; }
  static void store_pairs(std::uint16_t* to, U x) {
    store(to, x);
    store(to + 1, x >> 16);
  }
  static void stream_pairs(std::uint16_t* to, U x) { store_pairs(to, x); }
  // These store the bytes of two vectors. Only the low byte of each half, or of each lane, is not zero.
  static void store_half_bytes(std::uint8_t* to, U a, U b) {
    store_lane_bytes(to, a, a >> 16);
    store_lane_bytes(to + 2, b, b >> 16);
  }
  static void store_lane_bytes(std::uint8_t* to, U a, U b) {
    store(to, a);
    store(to + 1, b);
  }
  // Sixteen values, of which look_up() takes those that the low four bits of the lanes name.
  struct Table {
    F values[16];
  };
  static Table table(const float* values) {
    Table made;
    for (std::size_t i = 0; i < 16; ++i) {
      made.values[i] = values[i];
    }
    return made;
  }
  static F look_up(const Table& table, U index) { return table.values[index & 0xfu]; }
  static U lane_numbers() { return 0; }
  static std::uint32_t max_of_lanes(U x) { return x; }
  static Doubles load_doubles(const float* from) {
    Doubles x;
    for (int i = 0; i < 8; ++i) {
      x.lanes[i] = static_cast<double>(from[i]);
    }
    return x;
  }
  static double sum_of_lanes(const Doubles& x) {  // adds halves: 0+4, 1+5, 2+6, 3+7, then 0+2, 1+3, then 0+1
    const auto& d = x.lanes;
    return ((d[0] + d[4]) + (d[2] + d[6])) + ((d[1] + d[5]) + (d[3] + d[7]));
  }
};

}  // namespace ballast::kernels::simd
