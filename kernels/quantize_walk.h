// The CPU walks of block quantization, for any width of lanes S. They work group by group. A last, incomplete group is
// filled up with zeros, which change no scale and become zeros in the codes.
#pragma once

#include "kernels/code_array.h"
#include "kernels/number_walk.h"
#include "kernels/quantize_pieces.h"
#include "kernels/random_math.h"
#include "kernels/state_math.h"

namespace ballast::kernels {

constexpr std::size_t group_code_bytes(CodeBits bits) { return bits == CodeBits::eight ? group_size : group_size / 2; }

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
  *to.scales = scale.scale;
  if (to.bits == CodeBits::eight) {
    encode_group<S>(group, scale, rounding, to.bits, CodeArray<S, 8>(to.codes));
  } else {
    encode_group<S>(group, scale, rounding, to.bits, CodeArray<S, 4>(to.codes));
  }
}

template <class S>
void quantize_walk(const ConstNumbers& from, const QuantizedPiece& to, const CodeRounding& rounding) {
  with_format(from.dtype, [&]<class Format>(Format) {
    const auto* source = elements<Format>(from);
    QuantizedPiece target = to;
    CodeRounding here = rounding;
    const std::size_t rest = from.count % group_size;
    for (std::size_t first = 0; first < from.count - rest; first += group_size) {
      quantize_group<S, Format>(source + first, target, here);
      target.codes += group_code_bytes(to.bits);
      target.scales += 1;
      here.first_index += group_size;
    }
    if (rest > 0) {
      typename Format::Stored last[group_size]{};
      std::uint8_t codes[group_size];
      std::memcpy(last, source + (from.count - rest), rest * sizeof last[0]);
      quantize_group<S, Format>(last, {to.bits, codes, target.scales}, here);
      std::memcpy(target.codes, codes, to.bits == CodeBits::eight ? rest : (rest + 1) / 2);
    }
  });
}

// --- Dequantize ---

template <class S, class Format>
void dequantize_group(const ConstQuantizedPiece& from, typename Format::Stored* to, Stores stores) {
  const typename S::F scale(*from.scales);
  if (from.bits == CodeBits::eight) {
    for (std::size_t i = 0; i < group_size; i += S::width) {
      store_number<S, Format>(to + i, from_code(S::load_signed(from.codes + i), scale), stores);
    }
    return;
  }
  for (std::size_t i = 0; i < group_size; i += S::width) {
    const auto code = extend_sign_of_4_bits(S::load_nibbles(from.codes, i));
    store_number<S, Format>(to + i, from_code(code, scale), stores);
  }
}

template <class S>
void dequantize_walk(const ConstQuantizedPiece& from, const Numbers& to, Stores wanted) {
  with_format(to.dtype, [&]<class Format>(Format) {
    auto* target = elements<Format>(to);
    const Stores stores = allowed<S, Format>(wanted, target);
    ConstQuantizedPiece source = from;
    const std::size_t rest = to.count % group_size;
    for (std::size_t first = 0; first < to.count - rest; first += group_size) {
      dequantize_group<S, Format>(source, target + first, stores);
      source.codes += group_code_bytes(from.bits);
      source.scales += 1;
    }
    if (rest > 0) {
      std::uint8_t codes[group_size]{};
      typename Format::Stored last[group_size];
      std::memcpy(codes, source.codes, from.bits == CodeBits::eight ? rest : (rest + 1) / 2);
      dequantize_group<S, Format>({from.bits, codes, source.scales}, last, Stores::cached);
      std::memcpy(target + (to.count - rest), last, rest * sizeof last[0]);
    }
    if (stores == Stores::streamed) {
      S::finish_streams();
    }
  });
}

}  // namespace ballast::kernels
