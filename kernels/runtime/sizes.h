// Readable byte counts. Pure functions.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ballast {

// "1.5 GiB": four significant digits, powers of 1024.
std::string human_bytes(std::size_t bytes);

// "512MiB", "1.5 GiB", "40GB" (powers of 1000), "1e9", "4096". Capitals do not matter, a fraction of a byte is dropped.
// "40G" is refused, because many readers take it for GiB.
std::size_t parse_bytes(std::string_view text);

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace ballast
