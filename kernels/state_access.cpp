#include "kernels/state_access.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/number_math.h"
#include "kernels/number_walk.h"
#include "kernels/octet.h"

namespace ballast::kernels {
namespace {

// Half of the last kept bit. Adding it as noise rounds to the nearest.
constexpr std::uint32_t half_of_bf16 = 0x8000u;
constexpr std::uint32_t half_of_remainder = 0x80u;

struct Stored {
  std::byte* bytes;
  float* scales;
};

void require_size(const TileMemory& tile, std::size_t count) {
  require(count == tile.count, Code::wrong_size, [&] {
    return Problem{.what = "cannot read or write a moment: the memory has another size",
                   .needed = fmt::format("{} elements", tile.count),
                   .available = fmt::format("{} elements", count)};
  });
}

// Without bytes if the tile has no such moment.
Stored stored(const TileMemory& tile, Moment moment) {
  return moment == Moment::momentum ? Stored{tile.momentum, tile.momentum_scales}
                                    : Stored{tile.variance, tile.variance_scales};
}

Stored stored(const TileMemory& tile, Moment moment, std::size_t count) {
  const Stored found = stored(tile, moment);
  require(found.bytes != nullptr, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot read the {} moment: the update rule keeps none",
                                       moment == Moment::momentum ? "first" : "second"),
                   .needed = "a moment that the rule keeps"};
  });
  require_size(tile, count);
  return found;
}

// Returns one of the trainer's own values, in each of the tile's elements.
std::span<float> own_values(const TileMemory& tile, Moment moment, std::size_t count) {
  require(own_number(moment) < tile.own.count, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot read value {} of the trainer's own", own_number(moment) + 1),
                   .needed = "a value that the training keeps",
                   .available = fmt::format("{} for each element", tile.own.count)};
  });
  require_size(tile, count);
  return {tile.own.array(own_number(moment)), count};
}

// Calls visit(code) with the code of a moment in a format that has scales.
template <class Visit>
void with_code(StateFormat format, Moment moment, const Visit& visit) {
  const auto visit_codes = [&]<class Codes>(Codes) {
    if (moment == Moment::momentum) {
      visit(typename Codes::Momentum{});
    } else {
      visit(typename Codes::Root{});
    }
  };
  if (format == StateFormat::compact) {
    visit_codes(MomentCodes<StateFormat::compact>{});
  } else {
    visit_codes(MomentCodes<StateFormat::four_bit>{});
  }
}

template <class Code>
using StoredCode = std::conditional_t<Code::bits_of_code == 8, std::uint8_t, Nibble>;

// A momentum is coded as it is, a variance by its root.
float coded(float value, Moment moment) { return moment == Moment::momentum ? value : std::sqrt(value); }
float from_coded(float x, Moment moment) { return moment == Moment::momentum ? x : x * x; }

template <class Code>
void encode_group(std::span<const float> values, Moment moment, std::byte* bytes, float& scale) {
  std::uint32_t bits = 0;  // the bits of a NaN exceed all others as numbers: the group becomes NaN, as in an update
  for (const float value : values) {
    bits = std::max(bits, std::bit_cast<std::uint32_t>(std::abs(coded(value, moment))));
  }
  const auto largest = std::bit_cast<float>(bits);
  const float factor = Code::factor(largest);
  scale = Code::scale(largest);
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_element<StoredCode<Code>>(bytes, i, Code::encode(coded(values[i], moment), factor, Code::nearest));
  }
}

std::uint16_t* halves(std::byte* memory) { return reinterpret_cast<std::uint16_t*>(memory); }

float read_master(const TileMemory& tile, std::size_t i) {
  if (tile.parameter_dtype == DType::fp32) return reinterpret_cast<const float*>(tile.parameter)[i];
  const std::uint32_t parameter = halves(tile.parameter)[i];
  if (tile.master == nullptr) return tile.parameter_dtype == DType::bf16 ? from_bf16(parameter) : from_fp16(parameter);
  switch (tile.format) {
    case StateFormat::fp32: return reinterpret_cast<const float*>(tile.master)[i];
    case StateFormat::split:
    case StateFormat::bf16: return join16(parameter << 16 | halves(tile.master)[i]);
    case StateFormat::compact:
    case StateFormat::four_bit: break;
  }
  return join8(parameter << 16, static_cast<std::uint32_t>(static_cast<std::int8_t>(tile.master[i])));
}

// Also writes the parameter, which is the rounded master.
void write_master(const TileMemory& tile, std::size_t i, float master) {
  if (tile.parameter_dtype == DType::fp32) {
    reinterpret_cast<float*>(tile.parameter)[i] = master;
    return;
  }
  std::uint16_t& parameter = halves(tile.parameter)[i];
  if (tile.format == StateFormat::fp32) {
    if (tile.master != nullptr) reinterpret_cast<float*>(tile.master)[i] = master;
    const bool is_bf16 = tile.parameter_dtype == DType::bf16;
    parameter = static_cast<std::uint16_t>(is_bf16 ? to_bf16_parameter(master) : to_fp16(master));
  } else if (master_bytes(tile.format) == 1) {
    const auto nearest = split8(master, half_of_remainder);
    const auto below = split8(master, 0u);
    // The parameter must have the bits that it has in every other format, so rounding the remainder may not change it.
    const bool same_parameter = (nearest.parameter ^ below.parameter) >> 16 == 0;
    parameter = static_cast<std::uint16_t>(below.parameter >> 16);
    tile.master[i] = static_cast<std::byte>(same_parameter ? nearest.remainder : below.remainder);
  } else {
    const std::uint32_t parts = split16(master);
    parameter = static_cast<std::uint16_t>(parts >> 16);
    halves(tile.master)[i] = static_cast<std::uint16_t>(parts);
  }
}

void copy_master(const TileMemory& from, const TileMemory& to) {
  const bool same_master = from.format == to.format && (from.master != nullptr) == (to.master != nullptr);
  if (same_master && from.parameter_dtype == to.parameter_dtype) {
    std::memcpy(to.parameter, from.parameter, to.count * byte_size(to.parameter_dtype));
    if (to.master != nullptr) std::memcpy(to.master, from.master, to.count * master_bytes(to.format));
    return;
  }
  for (std::size_t i = 0; i < to.count; ++i) {
    write_master(to, i, read_master(from, i));
  }
}

void copy_moment(const TileMemory& from, const TileMemory& to, Moment moment) {
  const Stored source = stored(from, moment), target = stored(to, moment);
  if (target.bytes == nullptr) return;
  const std::size_t bytes = moment_bytes(to.format, to.count);
  const std::size_t groups = target.scales == nullptr ? 0 : (to.count + group_size - 1) / group_size;
  if (source.bytes == nullptr) {
    std::memset(target.bytes, 0, bytes);
    std::fill_n(target.scales, groups, 0.0f);
  } else if (from.format == to.format) {
    std::memcpy(target.bytes, source.bytes, bytes);
    std::copy_n(source.scales, groups, target.scales);
  } else {
    std::vector<float> values(to.count);
    read_moment(from, moment, values);
    write_moment(to, moment, values);
  }
}

// Values that `from` lacks become zero.
void copy_own_values(const TileMemory& from, const TileMemory& to) {
  for (std::size_t number = 0; number < to.own.count; ++number) {
    if (number < from.own.count) {
      std::copy_n(from.own.array(number), to.count, to.own.array(number));
    } else {
      std::fill_n(to.own.array(number), to.count, 0.0f);
    }
  }
}

}  // namespace

void copy_state(const TileMemory& from, const TileMemory& to) {
  copy_parameter(from, to);
  copy_moment(from, to, Moment::momentum);
  copy_moment(from, to, Moment::variance);
  copy_own_values(from, to);
}

void copy_parameter(const TileMemory& from, const TileMemory& to) {
  require(from.count == to.count, Code::wrong_size, [&] {
    return Problem{.what = "cannot copy the state: the tiles have different sizes",
                   .needed = fmt::format("{} elements", to.count),
                   .available = fmt::format("{} elements", from.count)};
  });
  copy_master(from, to);
}

void read_moment(const TileMemory& tile, Moment moment, std::span<float> values) {
  if (is_own(moment)) {
    std::ranges::copy(own_values(tile, moment, values.size()), values.begin());
    return;
  }
  const Stored kept = stored(tile, moment, values.size());
  switch (tile.format) {
    case StateFormat::fp32:
    case StateFormat::split: std::memcpy(values.data(), kept.bytes, values.size_bytes()); return;
    case StateFormat::bf16:
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = from_bf16(reinterpret_cast<const std::uint16_t*>(kept.bytes)[i]);
      }
      return;
    case StateFormat::compact:
    case StateFormat::four_bit:
      with_code(tile.format, moment, [&]<class Code>(Code) {
        for (std::size_t i = 0; i < values.size(); ++i) {
          const std::uint32_t code = load_element<StoredCode<Code>>(kept.bytes, i);
          values[i] = from_coded(Code::decode(code, kept.scales[i / group_size]), moment);
        }
      });
      return;
  }
}

void write_moment(const TileMemory& tile, Moment moment, std::span<const float> values) {
  if (is_own(moment)) {
    std::ranges::copy(values, own_values(tile, moment, values.size()).begin());
    return;
  }
  const Stored kept = stored(tile, moment, values.size());
  switch (tile.format) {
    case StateFormat::fp32:
    case StateFormat::split: std::memcpy(kept.bytes, values.data(), values.size_bytes()); return;
    case StateFormat::bf16:
      for (std::size_t i = 0; i < values.size(); ++i) {
        const std::uint32_t rounded = add_noise(values[i], half_of_bf16);
        reinterpret_cast<std::uint16_t*>(kept.bytes)[i] = static_cast<std::uint16_t>(rounded >> 16);
      }
      return;
    case StateFormat::compact:
    case StateFormat::four_bit:
      for (std::size_t first = 0; first < values.size(); first += group_size) {
        const auto group = values.subspan(first, std::min(group_size, values.size() - first));
        with_code(tile.format, moment, [&]<class Code>(Code) {
          encode_group<Code>(group, moment, kept.bytes + moment_bytes(tile.format, first),
                             kept.scales[first / group_size]);
        });
      }
      return;
  }
}

void begin_master(const TileMemory& tile, Backend& backend) {
  if (tile.master == nullptr) return;
  if (tile.format == StateFormat::fp32) {
    const ConstView parameter(tile.parameter, tile.count, tile.parameter_dtype);
    return backend.cast(parameter, View(tile.master, tile.count, DType::fp32));
  }
  std::memset(tile.master, 0, tile.count * master_bytes(tile.format));  // the bits below the parameter's
}

TileMemory part(const TileMemory& tile, std::size_t first, std::size_t count) {
  const bool shares_scales = tile.momentum_scales != nullptr || tile.variance_scales != nullptr;
  require(!shares_scales || first % group_size == 0, Code::unaligned, [&] {
    return Problem{
        .what = fmt::format("cannot divide state between elements that share a scale, as in {}", name(tile.format)),
        .where = fmt::format("element {}", first),
        .needed = fmt::format("parts that begin at multiples of {} elements; or another state format", group_size)};
  });
  TileMemory piece = tile;
  const auto advance = [](auto*& array, std::size_t values) {
    if (array != nullptr) array += values;
  };
  each_array(piece, [&](auto*& array, std::size_t bits) { advance(array, first * bits / 8); });
  advance(piece.momentum_scales, first / group_size);
  advance(piece.variance_scales, first / group_size);
  advance(piece.own.first, first);
  piece.first_index += first;
  piece.count = count;
  return piece;
}

}  // namespace ballast::kernels
