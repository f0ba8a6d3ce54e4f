// The CPU walks of block quantization, for any width of lanes S. They work group by group. A last, incomplete group is
// filled up with zeros, which change no scale and become zeros in the codes.
#pragma once

#include "kernels/number_math.h"
#include "kernels/number_walk.h"
#include "kernels/quantize_math.h"
#include "kernels/random_math.h"

namespace ballast::kernels {

// --- Quantize ---

template <class S, class Format>
std::uint32_t read_group(const typename Format::Stored* from, float* group) {
  using U = typename S::U;
  U largest(0u);
  for (std::size_t i = 0; i < group_size; i += S::width) {
    const auto x = load_number<S, Format>(from + i);
    S::store(group + i, x);
    largest = max(largest, bits(magnitude(x)));
  }
  return S::max_of_lanes(largest);
}

template <class S, class Codes>
void encode_group(const float* group, const GroupScale& scale, const CodeRounding& rounding, CodeBits code_bits,
                  const Codes& codes) {
  using F = typename S::F;
  using U = typename S::U;
  const U largest(static_cast<std::uint32_t>(largest_code(code_bits)));
  const F factor(scale.factor);
  if (scale.factor == 0.0f) {
    for (std::size_t i = 0; i < group_size; i += S::width) {
      codes.store(i, U(0u));
    }
  } else if (!rounding.stochastic) {
    for (std::size_t i = 0; i < group_size; i += S::width) {
      codes.store(i, to_nearest_code(S::load(group + i), factor, largest));
    }
  } else {
    const RoundingKey key = rounding_key(rounding.stream, rounding.first_index);
    const U index = S::lane_numbers() + U(static_cast<std::uint32_t>(rounding.first_index));
    for (std::size_t i = 0; i < group_size; i += S::width) {
      const F noise = noise_of(random_bits(index + U(static_cast<std::uint32_t>(i)), key));
      codes.store(i, to_stochastic_code(S::load(group + i), factor, noise, largest));
    }
  }
}

template <class S, class Format>
void quantize_group(const typename Format::Stored* from, const QuantizedPiece& to, const CodeRounding& rounding) {
  alignas(64) float group[group_size];
  const GroupScale scale = group_scale(read_group<S, Format>(from, group), to.bits);
  std::memcpy(to.blocks, &scale.scale, scale_bytes);
  auto* const codes = reinterpret_cast<std::uint8_t*>(to.blocks) + scale_bytes;
  if (to.bits == CodeBits::eight) {
    encode_group<S>(group, scale, rounding, to.bits, CodeArray<S, 8>(codes));
  } else {
    encode_group<S>(group, scale, rounding, to.bits, CodeArray<S, 4>(codes));
  }
}

template <class S>
void quantize_walk(const ConstNumbers& from, const QuantizedPiece& to, const CodeRounding& rounding) {
  with_format(from.dtype, [&]<class Format>(Format) {
    each_group<S>(elements<Format>(from), from.count, [&](const auto* group, std::size_t first) {
      CodeRounding here = rounding;
      here.first_index += first;
      quantize_group<S, Format>(group, {to.bits, to.blocks + first / group_size * block_bytes(to.bits)}, here);
    });
  });
}

// --- Dequantize ---

template <class S>
typename S::F load_scale(const std::byte* block) {
  float scale;
  std::memcpy(&scale, block, scale_bytes);
  return typename S::F(scale);
}

// The values of the block's codes from `i` on, a multiple of the number of lanes.
template <class S, CodeBits bits>
typename S::F load_quantized(const std::byte* block, std::size_t i, typename S::F scale) {
  const auto* const codes = reinterpret_cast<const std::uint8_t*>(block) + scale_bytes;
  if constexpr (bits == CodeBits::eight) {
    return from_code(S::load_signed(codes + i), scale);
  } else {
    return from_code(extend_sign_of_4_bits(S::load_nibbles(codes, i)), scale);
  }
}

template <class S, CodeBits bits, class Format>
void dequantize_group(const std::byte* block, typename Format::Stored* to, Stores stores) {
  const auto scale = load_scale<S>(block);
  for (std::size_t i = 0; i < group_size; i += S::width) {
    store_number<S, Format>(to + i, load_quantized<S, bits>(block, i, scale), stores);
  }
}

template <class S, CodeBits bits, class Format>
void dequantize_groups(const std::byte* block, typename Format::Stored* to, std::size_t count, Stores stores) {
  const std::size_t rest = count % group_size;
  for (std::size_t first = 0; first < count - rest; first += group_size) {
    dequantize_group<S, bits, Format>(block, to + first, stores);
    block += block_bytes(bits);
  }
  if (rest > 0) {
    typename Format::Stored last[group_size];
    dequantize_group<S, bits, Format>(block, last, Stores::cached);
    std::memcpy(to + (count - rest), last, rest * sizeof last[0]);
  }
  if (stores == Stores::streamed) S::finish_streams();
}

template <class S>
void dequantize_walk(const ConstQuantizedPiece& from, const Numbers& to, Stores wanted) {
  with_format(to.dtype, [&]<class Format>(Format) {
    auto* const target = elements<Format>(to);
    const Stores stores = allowed<S, Format>(wanted, target);
    if (from.bits == CodeBits::eight) {
      dequantize_groups<S, CodeBits::eight, Format>(from.blocks, target, to.count, stores);
    } else {
      dequantize_groups<S, CodeBits::four, Format>(from.blocks, target, to.count, stores);
    }
  });
}

// --- Sum ---

// Adds the group whose blocks begin `at` bytes after the beginning of each array. `sums` holds the sum so far, in fp32.
template <class S, CodeBits bits>
void add_groups(const Summands& from, std::size_t at, float* sums) {
  using F = typename S::F;
  for (std::size_t array = 0; array < from.arrays; ++array) {
    const std::byte* const block = from.data[array] + at;
    const F scale = load_scale<S>(block);
    for (std::size_t i = 0; i < group_size; i += S::width) {
      S::store(sums + i, accumulated(S::load(sums + i), load_quantized<S, bits>(block, i, scale), F(1.0f)));
    }
  }
}

template <class S, CodeBits bits, class Into>
void sum_quantized_arrays(const Summands& from, typename Into::Stored* into) {
  using F = typename S::F;
  std::size_t at = 0;
  for (std::size_t first = 0; first < from.count; first += group_size) {
    const std::size_t count = from.count - first < group_size ? from.count - first : group_size;
    typename Into::Stored group[group_size]{};
    alignas(64) float sums[group_size];
    if (from.continues) std::memcpy(group, into + first, count * sizeof group[0]);
    for (std::size_t i = 0; i < group_size; i += S::width) {
      S::store(sums + i, from.continues ? load_number<S, Into>(group + i) : F(0.0f));
    }
    add_groups<S, bits>(from, at, sums);
    for (std::size_t i = 0; i < group_size; i += S::width) {
      store_number<S, Into>(group + i, S::load(sums + i));
    }
    std::memcpy(into + first, group, count * sizeof group[0]);
    at += block_bytes(bits);
  }
}

// `into` has the count of the arrays, and is fp32 if the sum continues.
template <class S>
void sum_quantized_walk(const QuantizedSummands& from, const Numbers& into) {
  with_format(into.dtype, [&]<class Into>(Into) {
    auto* const target = elements<Into>(into);
    if (from.bits == CodeBits::eight) {
      sum_quantized_arrays<S, CodeBits::eight, Into>(from.arrays, target);
    } else {
      sum_quantized_arrays<S, CodeBits::four, Into>(from.arrays, target);
    }
  });
}

}  // namespace ballast::kernels
