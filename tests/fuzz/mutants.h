// Genuine bytes with a few that are changed, for readers of bytes that a stranger or a damaged file may have chosen. A reader
// returns for all bytes, and refuses with ballast::Error what it does not accept.
#pragma once

#include <ballast/error.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>

namespace ballast::testing {

inline void require_holds(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

// Calls a reader that may refuse.
template <class Read>
void may_refuse(Read&& read) {
  try {
    read();
  } catch (const Error&) {
  }
}

// Returns the bytes with a few that are changed, lost, added or repeated.
template <class Bytes>
Bytes mutant(Bytes bytes, std::mt19937_64& random) {
  const auto at_most = [&](std::size_t most) { return static_cast<std::size_t>(random() % (most + 1)); };
  constexpr std::array<std::uint64_t, 6> words{0, 1, UINT64_MAX, std::uint64_t{1} << 63, 1 << 20, 0x3034303230313020};
  for (std::size_t changes = 1 + at_most(2); changes > 0 && !bytes.empty(); --changes) {
    const std::size_t at = at_most(bytes.size() - 1);
    const std::size_t count = std::min(bytes.size() - at, std::array<std::size_t, 4>{1, 4, 8, 64}[at_most(3)]);
    const auto first = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    switch (at_most(3)) {
      case 0: std::memcpy(&*first, &words[at_most(5)], std::min<std::size_t>(count, 8)); break;
      case 1: std::memset(&*first, static_cast<int>(random() % 256), 1); break;
      case 2: bytes.erase(first, first + static_cast<std::ptrdiff_t>(count)); break;
      default: {
        const Bytes repeated(first, first + static_cast<std::ptrdiff_t>(count));
        bytes.insert(first, repeated.begin(), repeated.end());
      }
    }
  }
  return bytes;
}

// A round for each seed, whose number a failure names.
inline void for_mutants(std::size_t rounds, const std::function<void(std::mt19937_64& random)>& round) {
  for (std::size_t seed = 0; seed < rounds; ++seed) {
    std::mt19937_64 random(seed);
    try {
      round(random);
    } catch (const std::exception& error) {
      throw std::runtime_error("seed " + std::to_string(seed) + ": " + error.what());
    }
  }
}

}  // namespace ballast::testing
