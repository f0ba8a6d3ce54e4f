// Pseudo-random bits that are functions of their keys: the same on every rank, and after a restart.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace ballast::llama {

constexpr std::uint64_t noise(std::initializer_list<std::uint64_t> keys) {
  std::uint64_t x = 0;
  for (const std::uint64_t key : keys) {  // SplitMix64's last step
    x += key + 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
  }
  return x;
}

}  // namespace ballast::llama
