// The optimizer state of a tile: its format, and where its bytes are.
#pragma once

#include <ballast/view.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ballast {

// Which bytes an optimizer keeps for an element. See docs/concepts/state-formats.md.
enum class StateFormat : std::uint8_t { fp32, split, bf16, compact, four_bit };

inline constexpr StateFormat all_state_formats[] = {StateFormat::fp32, StateFormat::split, StateFormat::bf16,
                                                    StateFormat::compact, StateFormat::four_bit};

// Elements that share a scale. Shards, tiles and runs start at multiples of it, so that a group has one owner.
inline constexpr std::size_t group_size = 128;

constexpr std::string_view name(StateFormat format) {
  constexpr std::string_view names[] = {"fp32", "split", "bf16", "compact", "4bit"};
  return names[static_cast<std::size_t>(format)];
}

constexpr std::size_t master_bytes(StateFormat format) {
  constexpr std::size_t bytes[] = {4, 2, 2, 1, 1};
  return bytes[static_cast<std::size_t>(format)];
}

constexpr std::size_t moment_bits(StateFormat format) {
  constexpr std::size_t bits[] = {32, 32, 16, 8, 4};
  return bits[static_cast<std::size_t>(format)];
}

// The bytes of one moment of `count` elements, the first of which begins a group. Two elements of format 4bit share a
// byte, the first in its lower half; an unused half is zero.
constexpr std::size_t moment_bytes(StateFormat format, std::size_t count) {
  const std::size_t bits = moment_bits(format);
  return bits >= 8 ? count * (bits / 8) : count / 2 + count % 2;
}

// Whether the moments of a group share a scale.
constexpr bool has_scales(StateFormat format) { return moment_bits(format) <= 8; }

// Values that the trainer keeps for each element, for its own rule: arrays of fp32 at equal distances.
struct OwnValues {
  float* first = nullptr;    // null if there are none
  std::size_t distance = 0;  // floats from one array to the next
  std::size_t count = 0;     // arrays

  float* array(std::size_t number) const { return first + number * distance; }
};

inline constexpr std::size_t max_own_values = 8;

// A value of an element's state: a moment of a rule, or one of the trainer's own values, which are numbered from `own` on.
enum class Moment : std::uint8_t { momentum, variance, own };

constexpr Moment own_value(std::size_t number) {
  return static_cast<Moment>(static_cast<std::size_t>(Moment::own) + number);
}

// The number of one of the trainer's own values.
constexpr std::size_t own_number(Moment moment) {
  return static_cast<std::size_t>(moment) - static_cast<std::size_t>(Moment::own);
}

constexpr bool is_own(Moment moment) { return moment >= Moment::own; }

// The memory of a tile, or of a part of one. All pointers refer to its first element.
struct TileMemory {
  StateFormat format = StateFormat::fp32;
  DType parameter_dtype = DType::bf16;  // fp32 and fp16 with format fp32 only; an fp32 parameter is itself the master
  DType gradient_dtype = DType::bf16;
  std::byte* parameter = nullptr;
  const std::byte* gradient = nullptr;
  std::byte* master = nullptr;       // null if the parameter is the master
  std::byte* momentum = nullptr;     // null if the rule has none
  std::byte* variance = nullptr;     // null if the rule has none
  float* momentum_scales = nullptr;  // one for each group of elements, if has_scales(format)
  float* variance_scales = nullptr;
  OwnValues own{};
  std::size_t count = 0;
  std::uint64_t first_index = 0;      // the first element's index in its unit; determines the random bits
  std::uint64_t rounding_stream = 0;  // the other half of what determines them
};

}  // namespace ballast
