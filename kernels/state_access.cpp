#include "kernels/state_access.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/runtime/error.h"
#include "kernels/state_math.h"

namespace ballast::kernels {
namespace {

// A half of the last bit that is kept: adding it as noise rounds to the nearest.
constexpr std::uint32_t half_of_bf16 = 0x8000u;
constexpr std::uint32_t half_of_momentum = 1u << 31;  // of which compand_momentum takes the upper 19 bits
constexpr std::uint32_t half_of_root = 1u << 17;

struct Stored {
  std::byte* bytes;
  float* scales;
};

Stored stored(const UpdateTile& tile, Moment moment, std::size_t numbers) {
  const bool is_first = moment == Moment::momentum;
  const Stored found{is_first ? tile.momentum : tile.variance, is_first ? tile.momentum_scales : tile.variance_scales};
  require(found.bytes != nullptr, Code::bad_argument, [&] {
    return Problem{
        .what = fmt::format("the {} moment was asked for of a rule that keeps none", is_first ? "first" : "second")};
  });
  require(numbers == tile.count, Code::wrong_size, [&] {
    return Problem{.what = "a moment was asked for in memory of another size",
                   .needed = fmt::format("{} elements", tile.count),
                   .available = fmt::format("{} elements", numbers)};
  });
  return found;
}

float expand(std::uint8_t code, Moment moment, float scale) {
  if (moment == Moment::momentum) {
    return expand_momentum<float>(static_cast<std::uint32_t>(static_cast<std::int32_t>(static_cast<std::int8_t>(code))),
                                  scale);
  }
  const float root = expand_root<float>(std::uint32_t{code}, scale);
  return root * root;
}

// The root of a variance; a momentum as it is.
float companded(float number, Moment moment) { return moment == Moment::momentum ? number : std::sqrt(number); }

void compand_group(std::span<const float> numbers, Moment moment, std::uint8_t* codes, float& scale) {
  float largest = 0.0f;
  for (const float number : numbers) {
    largest = std::max(largest, std::abs(companded(number, moment)));
  }
  const float factor = compand_factor(largest);
  scale = compand_scale(largest);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const float value = companded(numbers[i], moment);
    codes[i] = static_cast<std::uint8_t>(moment == Moment::momentum ? compand_momentum(value, factor, half_of_momentum)
                                                                    : compand_root(value, factor, half_of_root));
  }
}

}  // namespace

void read_moment(const UpdateTile& tile, Moment moment, std::span<float> numbers) {
  const auto [bytes, scales] = stored(tile, moment, numbers.size());
  switch (tile.format) {
    case StateFormat::fp32:
    case StateFormat::split: std::memcpy(numbers.data(), bytes, numbers.size_bytes()); return;
    case StateFormat::bf16:
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        numbers[i] = from_bf16(reinterpret_cast<const std::uint16_t*>(bytes)[i]);
      }
      return;
    case StateFormat::compact:
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        numbers[i] = expand(static_cast<std::uint8_t>(bytes[i]), moment, scales[i / group_size]);
      }
      return;
  }
}

void write_moment(const UpdateTile& tile, Moment moment, std::span<const float> numbers) {
  const auto [bytes, scales] = stored(tile, moment, numbers.size());
  switch (tile.format) {
    case StateFormat::fp32:
    case StateFormat::split: std::memcpy(bytes, numbers.data(), numbers.size_bytes()); return;
    case StateFormat::bf16:
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        const std::uint32_t rounded = add_noise(numbers[i], half_of_bf16);
        reinterpret_cast<std::uint16_t*>(bytes)[i] = static_cast<std::uint16_t>(rounded >> 16);
      }
      return;
    case StateFormat::compact:
      for (std::size_t first = 0; first < numbers.size(); first += group_size) {
        const auto group = numbers.subspan(first, std::min(group_size, numbers.size() - first));
        compand_group(group, moment, reinterpret_cast<std::uint8_t*>(bytes) + first, scales[first / group_size]);
      }
      return;
  }
}

void begin_master(const UpdateTile& tile, Backend& backend) {
  if (tile.master == nullptr) return;
  if (tile.format == StateFormat::fp32) {
    const ConstView parameter(tile.parameter, tile.count, tile.parameter_dtype);
    return backend.cast(parameter, View(tile.master, tile.count, DType::fp32));
  }
  std::memset(tile.master, 0, tile.count * master_bytes(tile.format));  // what it has beyond the parameter
}

}  // namespace ballast::kernels
