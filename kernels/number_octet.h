// Octets of values in any format. The kernel chooses the format at run time: all threads take the same branch, and
// memory is slower than the branch.
#pragma once

#include "kernels/accumulate_math.h"
#include "kernels/chunks.h"
#include "kernels/number_format.h"
#include "kernels/numbers.h"

namespace ballast::kernels {

inline bool is_octet_aligned(const ConstNumbers& numbers) {
  return is_octet_aligned(numbers.data, octet_size * byte_size(numbers.dtype));
}
inline bool is_octet_aligned(const Numbers& numbers) {
  return is_octet_aligned(numbers.data, octet_size * byte_size(numbers.dtype));
}
inline bool is_octet_aligned(const Summands& summands) {
  bool aligned = true;
  for (std::size_t array = 0; array < summands.arrays; ++array) {
    aligned = aligned && is_octet_aligned(summands.data[array], octet_size * byte_size(summands.dtype));
  }
  return aligned;
}

template <class T>
constexpr Octet load_octet_of(const std::byte* array, const OctetPlace& place) {
  return place.whole ? load_octet<T, true>(array, place) : load_octet<T, false>(array, place);
}

template <class T>
constexpr void store_octet_of(std::byte* array, const OctetPlace& place, const Octet& octet) {
  if (place.whole) {
    store_octet<T, true>(array, place, octet);
  } else {
    store_octet<T, false>(array, place, octet);
  }
}

// Loads patterns. The switch avoids byte_size(): looking the size up in its table would put the table into each
// thread's memory.
constexpr Octet load_octet(const ConstNumbers& numbers, const OctetPlace& place) {
  switch (numbers.dtype) {
    case DType::fp32: return load_octet_of<std::uint32_t>(numbers.data, place);
    case DType::u8: return load_octet_of<std::uint8_t>(numbers.data, place);
    default: return load_octet_of<std::uint16_t>(numbers.data, place);
  }
}

constexpr void store_octet(const Numbers& numbers, const OctetPlace& place, const Octet& octet) {
  switch (numbers.dtype) {
    case DType::fp32: return store_octet_of<std::uint32_t>(numbers.data, place, octet);
    case DType::u8: return store_octet_of<std::uint8_t>(numbers.data, place, octet);
    default: return store_octet_of<std::uint16_t>(numbers.data, place, octet);
  }
}

struct FloatOctet {
  float at[octet_size];
};

template <class Format>
constexpr FloatOctet decode_octet(const Octet& patterns) {
  FloatOctet floats{};
  for (std::size_t i = 0; i < octet_size; ++i) {
    floats.at[i] = Format::decode(patterns.at[i]);
  }
  return floats;
}

template <class Format>
constexpr Octet encode_octet(const FloatOctet& floats) {
  Octet patterns{};
  for (std::size_t i = 0; i < octet_size; ++i) {
    patterns.at[i] = Format::encode(floats.at[i]);
  }
  return patterns;
}

// Loads values; not for u8.
constexpr FloatOctet load_floats(const ConstNumbers& numbers, const OctetPlace& place) {
  const Octet patterns = load_octet(numbers, place);
  switch (numbers.dtype) {
    case DType::bf16: return decode_octet<Bf16Format>(patterns);
    case DType::fp16: return decode_octet<Fp16Format>(patterns);
    default: return decode_octet<Fp32Format>(patterns);
  }
}

constexpr void store_floats(const Numbers& numbers, const OctetPlace& place, const FloatOctet& floats) {
  switch (numbers.dtype) {
    case DType::bf16: return store_octet(numbers, place, encode_octet<Bf16Format>(floats));
    case DType::fp16: return store_octet(numbers, place, encode_octet<Fp16Format>(floats));
    default: return store_octet(numbers, place, encode_octet<Fp32Format>(floats));
  }
}

// Equal formats are copied, and every pattern stays as it is.
constexpr void cast_octet(const ConstNumbers& from, const Numbers& to, const OctetPlace& place) {
  if (from.dtype == to.dtype) {
    store_octet(to, place, load_octet(from, place));
  } else {
    store_floats(to, place, load_floats(from, place));
  }
}

// Returns the patterns that a fill writes. For u8, `value` is a whole number.
constexpr Octet fill_octet(float value, DType dtype) {
  Octet octet{};
  for (std::uint32_t& element : octet.at) {
    element = dtype == DType::u8     ? static_cast<std::uint32_t>(value)
              : dtype == DType::bf16 ? to_bf16(value)
              : dtype == DType::fp16 ? to_fp16(value)
                                     : bits(value);
  }
  return octet;
}

constexpr void accumulate_octet(const ConstNumbers& from, float scale, const Numbers& into, const OctetPlace& place) {
  const FloatOctet added = load_floats(from, place);
  FloatOctet sum = load_floats({into.data, into.count, into.dtype}, place);
  for (std::size_t i = 0; i < octet_size; ++i) {
    sum.at[i] = accumulated(sum.at[i], added.at[i], scale);
  }
  store_floats(into, place, sum);
}

constexpr void sum_octet(const Summands& from, const Numbers& into, const OctetPlace& place) {
  FloatOctet sum{};
  if (from.continues) sum = load_floats({into.data, into.count, into.dtype}, place);
  for (std::size_t array = 0; array < from.arrays; ++array) {
    const FloatOctet added = load_floats({from.data[array], from.count, from.dtype}, place);
    for (std::size_t i = 0; i < octet_size; ++i) {
      sum.at[i] = accumulated(sum.at[i], added.at[i], 1.0f);
    }
  }
  store_floats(into, place, sum);
}

}  // namespace ballast::kernels
