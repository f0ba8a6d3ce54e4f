// The state formats: which bytes an optimizer keeps for an element. See state_math.h for how they are written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ballast::kernels {

enum class StateFormat : std::uint8_t { fp32, split, bf16, compact };

inline constexpr StateFormat all_state_formats[] = {StateFormat::fp32, StateFormat::split, StateFormat::bf16,
                                                    StateFormat::compact};

// Elements that share a scale. Shards, tiles and runs start at multiples of it, so that a group has one owner.
inline constexpr std::size_t group_size = 128;

constexpr std::string_view name(StateFormat format) {
  constexpr std::string_view names[] = {"fp32", "split", "bf16", "compact"};
  return names[static_cast<std::size_t>(format)];
}

constexpr std::size_t master_bytes(StateFormat format) {
  constexpr std::size_t bytes[] = {4, 2, 2, 1};
  return bytes[static_cast<std::size_t>(format)];
}

constexpr std::size_t moment_bytes(StateFormat format) {
  constexpr std::size_t bytes[] = {4, 4, 2, 1};
  return bytes[static_cast<std::size_t>(format)];
}

}  // namespace ballast::kernels
