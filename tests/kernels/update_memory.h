// All memory of an update in one block, at any address. So a tile can be copied to a GPU and back, or compared, as
// bytes, and a write outside its arrays is seen too.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/state_math.h"
#include "kernels/update.h"

namespace ballast::kernels {

struct UpdateShape {
  StateFormat format = StateFormat::fp32;
  DType parameter_dtype = DType::bf16;
  DType gradient_dtype = DType::bf16;
  std::size_t count = 0;
  std::size_t shift = 0;  // elements by which every array misses its alignment
  std::uint64_t first_index = 0;
};

class UpdateMemory {
 public:
  explicit UpdateMemory(const UpdateShape& shape, unsigned seed = 1) : shape_(shape), bytes_(end()), random_(seed) {
    TileMemory tile = tile_at(bytes_.data());
    fill(tile.gradient_dtype, const_cast<std::byte*>(tile.gradient), -2.0f, 2.0f);
    fill(tile.parameter_dtype, tile.parameter, -1.0f, 1.0f);
    fill_master(tile);
    fill_moments(tile);
  }

  std::vector<std::byte>& bytes() { return bytes_; }

  // Says where the other memory differs; nothing if it is the same.
  std::string difference(const UpdateMemory& other) const {
    static constexpr std::array names{"parameters",
                                      "gradients",
                                      "masters",
                                      "momenta",
                                      "variances",
                                      "scales of the momenta",
                                      "scales of the variances"};
    const auto at = static_cast<std::size_t>(std::ranges::mismatch(bytes_, other.bytes_).in1 - bytes_.begin());
    if (at == bytes_.size()) return {};
    std::size_t count = 0;
    for (std::size_t i = at; i < bytes_.size(); ++i) {
      if (bytes_[i] != other.bytes_[i]) ++count;
    }
    return fmt::format("{} bytes differ; the first is byte {} of the {}: {:02x}, not {:02x}", count, at % room() - 64,
                       names.at(at / room()), std::to_integer<unsigned>(bytes_[at]),
                       std::to_integer<unsigned>(other.bytes_[at]));
  }
  TileMemory tile() { return tile_at(bytes_.data()); }

  TileMemory tile_at(std::byte* base) const {
    TileMemory tile{.format = shape_.format,
                    .parameter_dtype = shape_.parameter_dtype,
                    .gradient_dtype = shape_.gradient_dtype,
                    .count = shape_.count,
                    .first_index = shape_.first_index,
                    .rounding_stream = 0x1234567890abcdef};
    tile.parameter = base + place(0, byte_size(shape_.parameter_dtype));
    tile.gradient = base + place(1, byte_size(shape_.gradient_dtype));
    tile.master = shape_.parameter_dtype == DType::fp32 ? nullptr : base + place(2, master_bytes(shape_.format));
    tile.momentum = base + place(3, moment_bytes(shape_.format, 1));
    tile.variance = base + place(4, moment_bytes(shape_.format, 1));
    if (has_scales(shape_.format)) {
      tile.momentum_scales = reinterpret_cast<float*>(base + place(5, 0));
      tile.variance_scales = reinterpret_cast<float*>(base + place(6, 0));
    }
    return tile;
  }

 private:
  static constexpr std::size_t arrays = 7;

  std::size_t room() const { return (4 * (shape_.count + shape_.shift) + 256 + 63) / 64 * 64; }
  std::size_t place(std::size_t array, std::size_t element_bytes) const {
    return array * room() + 64 + shape_.shift * element_bytes;
  }
  std::size_t end() const { return arrays * room(); }

  // The standard's distribution takes a logarithm for each number.
  float draw(float low, float high) { return low + (high - low) * 0x1p-24f * static_cast<float>(random_() >> 8); }

  void fill(DType dtype, std::byte* to, float low, float high) {
    for (std::size_t i = 0; i < shape_.count; ++i) {
      // A few values are zero, and a few are subnormal.
      const float x = i % 97 == 13 ? 0.0f : i % 89 == 7 ? 1e-40f : draw(low, high);
      const auto half = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16);
      if (dtype == DType::fp32) {
        std::memcpy(to + 4 * i, &x, 4);
      } else if (dtype == DType::bf16) {
        std::memcpy(to + 2 * i, &half, 2);
      } else {
        const auto fp16 = static_cast<std::uint16_t>(random_() & 0xbfffu);  // finite, below 2
        std::memcpy(to + 2 * i, &fp16, 2);
      }
    }
  }

  void fill_any(std::byte* to, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) {
      to[i] = static_cast<std::byte>(random_());
    }
  }

  void fill_master(const TileMemory& tile) {
    if (tile.format == StateFormat::fp32 && tile.master != nullptr) {
      fill(DType::fp32, tile.master, -1.0f, 1.0f);
    } else if (tile.master != nullptr) {
      fill_any(tile.master, shape_.count * master_bytes(tile.format));
      clear_remainders_of_zero(tile);
    }
  }

  // A zero with a negative remainder is not a number, and no number is stored so.
  void clear_remainders_of_zero(const TileMemory& tile) {
    for (std::size_t i = 0; i < shape_.count; ++i) {
      std::uint16_t parameter;
      std::memcpy(&parameter, tile.parameter + 2 * i, 2);
      if ((parameter & 0x7fff) == 0) {
        std::memset(tile.master + i * master_bytes(tile.format), 0, master_bytes(tile.format));
      }
    }
  }

  void fill_moments(const TileMemory& tile) {
    if (!has_scales(tile.format)) {
      const DType dtype = moment_bits(tile.format) == 32 ? DType::fp32 : DType::bf16;
      fill(dtype, tile.momentum, -0.1f, 0.1f);
      fill(dtype, tile.variance, 0.0f, 0.1f);
      return;
    }
    fill_any(tile.momentum, moment_bytes(tile.format, shape_.count));
    fill_any(tile.variance, moment_bytes(tile.format, shape_.count));
    for (std::size_t group = 0; group * group_size < shape_.count; ++group) {
      tile.momentum_scales[group] = draw(1e-6f, 0.1f);
      tile.variance_scales[group] = draw(1e-6f, 0.1f);
    }
  }

  UpdateShape shape_;
  std::vector<std::byte> bytes_;
  std::mt19937 random_;
};

// Returns one step of each rule that updates a master, with every coefficient in use.
inline std::vector<Rule> sample_rules() {
  const AdamW adamw{.decay = 0.999f,
                    .mean = RunningMean::of(0.9),
                    .beta2 = 0.999f,
                    .one_minus_beta2 = 0.001f,
                    .inverse_root_correction2 = 1.0f / std::sqrt(0.003f),
                    .eps = 1e-8f,
                    .step_size = 3e-4f};
  AdamW without_decay = adamw;
  without_decay.decay = 1.0f;
  without_decay.mean = RunningMean::of(0.3);  // gradients weigh more there
  return {adamw,
          Adam{.l2 = 0.01f, .without_decay = without_decay},
          Sgd{.lr = 0.01f, .l2 = 0.1f},
          SgdMomentum{.lr = 0.01f,
                      .l2 = 0.1f,
                      .momentum = 0.9f,
                      .one_minus_dampening = 0.7f,
                      .from_momentum = 0.9f,
                      .from_gradient = 1.0f},
          Lion{.lr = 1e-3f, .decay = 0.999f, .mean = RunningMean::of(0.9), .kept_mean = RunningMean::of(0.99)},
          Adagrad{.step_size = 0.01f, .l2 = 0.1f, .eps = 1e-10f},
          External{},
          MuonStep{.decay = 0.999f, .step_size = 0.02f}};
}

// Returns every allowed pair of parameter and gradient format.
inline std::vector<UpdateShape> sample_shapes(StateFormat format) {
  std::vector<UpdateShape> shapes;
  for (const DType gradient : {DType::fp32, DType::bf16, DType::fp16}) {
    shapes.push_back({.format = format, .parameter_dtype = DType::bf16, .gradient_dtype = gradient});
    if (format == StateFormat::fp32) {
      shapes.push_back({.format = format, .parameter_dtype = DType::fp32, .gradient_dtype = gradient});
      shapes.push_back({.format = format, .parameter_dtype = DType::fp16, .gradient_dtype = gradient});
    }
  }
  return shapes;
}

}  // namespace ballast::kernels
