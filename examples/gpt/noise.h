// Pseudo-random values that are functions of their keys only: the same on every rank, and after a restart.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace ballast::gpt {

// Returns the noise of the keys of `before` and one more key, by SplitMix64's last step.
constexpr std::uint64_t more_noise(std::uint64_t before, std::uint64_t number) {
  std::uint64_t x = before + number + 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

constexpr std::uint64_t noise(std::initializer_list<std::uint64_t> of) {
  std::uint64_t x = 0;
  for (const std::uint64_t number : of) {
    x = more_noise(x, number);
  }
  return x;
}

}  // namespace ballast::gpt
