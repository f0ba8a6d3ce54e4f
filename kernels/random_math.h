// Random bits for stochastic rounding. They depend only on element and step, so every thread or device that computes an
// element draws the same bits.
#pragma once

#include <cstdint>

#include "kernels/number_math.h"

namespace ballast::kernels {

struct RoundingKey {
  std::uint32_t first = 0;
  std::uint32_t second = 0;
};

// The finaliser of SplitMix64: every output bit depends on every input bit.
constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The seeds of a training's streams.
inline constexpr std::uint64_t seed_of_state = 0;
inline constexpr std::uint64_t seed_of_gradients = 1;
inline constexpr std::uint64_t seed_of_wire = 2;
inline constexpr std::uint64_t seed_of_outer = 3;  // the seed of what hosts exchange with an outer optimizer

// One stream of random bits for each step of a run, and for each rounding of an element in the step, by its number.
constexpr std::uint64_t rounding_stream(std::uint64_t seed, std::uint64_t number, std::uint64_t step) {
  return mix(mix(mix(seed + 0x9e3779b97f4a7c15u) + number) + step);
}

// The part of a stream that belongs to a tensor. Tensor 0 has the stream itself.
constexpr std::uint64_t stream_of_tensor(std::uint64_t stream, std::uint64_t tensor) {
  return stream + tensor * 0x9e3779b97f4a7c15u;
}

// The key of the elements of a stream that share the upper half of their index.
constexpr RoundingKey rounding_key(std::uint64_t stream, std::uint64_t index) {
  const std::uint64_t key = mix(stream + (index >> 32));
  return {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)};
}

// 32 random bits for the element whose index ends in `low_index`. Two multiplications (constants by C. Wellons, found
// by search for the least bias), with the second half of the key between them.
inline constexpr std::uint32_t first_multiplier = 0x7feb352du;

template <class U>
constexpr U random_bits_of_product(U x, RoundingKey key) {
  x = (x ^ shift_right<15>(x) ^ U(key.second)) * U(0x846ca68bu);
  return x ^ shift_right<16>(x);
}

template <class U>
constexpr U random_bits(U low_index, RoundingKey key) {
  return random_bits_of_product((low_index ^ U(key.first)) * U(first_multiplier), key);
}

}  // namespace ballast::kernels
