// The CPU walks of block quantization, for any width of lanes S. They work group by group. A last, incomplete group is
// filled up with zeros, which change no scale and become zeros in the codes.
#pragma once

#include "kernels/number_math.h"
#include "kernels/number_walk.h"
#include "kernels/quantize_math.h"

namespace ballast::kernels {

constexpr int width_of(CodeBits bits) { return bits == CodeBits::eight ? 8 : 4; }

// Calls body.operator()<bits>() for a number of bits that is known at run time.
template <class Body>
void with_bits(CodeBits bits, const Body& body) {
  bits == CodeBits::eight ? body.template operator()<CodeBits::eight>() : body.template operator()<CodeBits::four>();
}

// --- Quantize ---

template <class S, class Format>
std::uint32_t read_group(const typename Format::Stored* from, float* group) {
  using U = typename S::U;
  U largest(0u);
  for (std::size_t i = 0; i < group_size; i += 2 * S::width) {
    const auto x = load_two_numbers<S, Format, true>(from + i);
    store_two<S>(group + i, x);
    largest = max(largest, max(bits(magnitude(x.a)), bits(magnitude(x.b))));
  }
  return S::max_of_lanes(largest);
}

// Stores the codes code(i) of a group, of the two vectors that begin at i, which are in the low bits of their lanes.
template <class S, int bits, class Code>
void store_codes(const CodeArray<S, bits>& to, const Code& code) {
  const auto packed = [&](std::size_t i) { return pack_low_bits<bits>(code(i)); };
  for (std::size_t i = 0; i < group_size; i += 4 * S::width) {
    to.store(i, packed(i), packed(i + 2 * S::width));
  }
}

template <class S, CodeBits bits>
void encode_group(const float* group, const GroupScale& scale, const CodeRounding& rounding, std::byte* to) {
  using F = typename S::F;
  using U = typename S::U;
  const CodeArray<S, width_of(bits)> codes(reinterpret_cast<std::uint8_t*>(to));
  const U largest(static_cast<std::uint32_t>(largest_code(bits)));
  const F factor(scale.factor);
  if (scale.factor == 0.0f) {
    store_codes(codes, [](std::size_t) -> Two<U> { return {U(0u), U(0u)}; });
  } else if (!rounding.stochastic) {
    store_codes(codes, [&](std::size_t i) -> Two<U> {
      const Two<F> x = load_two<S>(group + i);
      return {to_nearest_code(x.a, factor, largest), to_nearest_code(x.b, factor, largest)};
    });
  } else {
    alignas(64) std::uint32_t random[group_size];
    draw_random_bits<S>(rounding.stream, rounding.first_index, random);
    store_codes(codes, [&](std::size_t i) -> Two<U> {
      const Two<F> x = load_two<S>(group + i);
      const Two<U> drawn = load_two<S>(random + i);
      return {to_stochastic_code(x.a, factor, noise_of(drawn.a), largest),
              to_stochastic_code(x.b, factor, noise_of(drawn.b), largest)};
    });
  }
}

template <class S, class Format>
void quantize_group(const typename Format::Stored* from, const QuantizedPiece& to, const CodeRounding& rounding) {
  alignas(64) float group[group_size];
  const GroupScale scale = group_scale(read_group<S, Format>(from, group), to.bits);
  std::memcpy(to.blocks, &scale.scale, scale_bytes);
  with_bits(to.bits, [&]<CodeBits bits>() { encode_group<S, bits>(group, scale, rounding, to.blocks + scale_bytes); });
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

// Calls take(i, values) for the values of a block in two vectors from `i` on, in pairs.
template <class S, CodeBits code_bits, class Take>
void each_two_quantized(const std::byte* block, const Take& take) {
  using U = typename S::U;
  constexpr int bits = width_of(code_bits);
  const typename S::F scale = load_scale<S>(block);
  const CodeArray<S, bits> codes(reinterpret_cast<std::uint8_t*>(const_cast<std::byte*>(block)) + scale_bytes);
  for (std::size_t i = 0; i < group_size; i += 2 * S::width) {
    const Two<U> two = unpack_low_bits<bits>(codes.load(i));
    take(i, Two<typename S::F>{from_code(extend_sign<bits>(two.a), scale), from_code(extend_sign<bits>(two.b), scale)});
  }
}

template <class S, CodeBits bits, class Format>
void dequantize_group(const std::byte* block, typename Format::Stored* to, Stores stores) {
  each_two_quantized<S, bits>(
      block, [&](std::size_t i, const auto& values) { store_two_numbers<S, Format>(to + i, values, stores); });
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
    const Stores stores = allowed<S>(wanted, target);
    with_bits(from.bits,
              [&]<CodeBits bits>() { dequantize_groups<S, bits, Format>(from.blocks, target, to.count, stores); });
  });
}

// --- Sum ---

// Adds the group whose blocks begin `at` bytes after the beginning of each array. `sums` holds the sum so far, in fp32.
template <class S, CodeBits bits>
void add_groups(const Summands& from, std::size_t at, float* sums) {
  using F = typename S::F;
  for (std::size_t array = 0; array < from.arrays; ++array) {
    each_two_quantized<S, bits>(from.data[array] + at, [&](std::size_t i, const Two<F>& values) {
      const Two<F> sum = load_two<S>(sums + i);
      store_two<S>(sums + i, Two<F>{accumulated(sum.a, values.a, F(1.0f)), accumulated(sum.b, values.b, F(1.0f))});
    });
  }
}

template <class S, CodeBits bits, class Into>
void sum_quantized_arrays(const Summands& from, typename Into::Stored* into) {
  std::size_t at = 0;
  for (std::size_t first = 0; first < from.count; first += group_size) {
    const std::size_t count = from.count - first < group_size ? from.count - first : group_size;
    typename Into::Stored group[group_size]{};
    alignas(64) float sums[group_size]{};
    if (from.continues) {
      std::memcpy(group, into + first, count * sizeof group[0]);
      for (std::size_t i = 0; i < group_size; i += 2 * S::width) {
        store_two<S>(sums + i, load_two_numbers<S, Into, true>(group + i));
      }
    }
    add_groups<S, bits>(from, at, sums);
    for (std::size_t i = 0; i < group_size; i += 2 * S::width) {
      store_two_numbers<S, Into>(group + i, load_two<S>(sums + i), Stores::cached);
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
    with_bits(from.bits, [&]<CodeBits bits>() { sum_quantized_arrays<S, bits, Into>(from.arrays, target); });
  });
}

}  // namespace ballast::kernels
