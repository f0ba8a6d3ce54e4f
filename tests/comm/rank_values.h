// The values that each rank brings to a collective, and the expected results.
#pragma once

#include <ballast/view.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/number_math.h"

namespace ballast::testing {

constexpr DType float_dtypes[] = {DType::fp32, DType::bf16, DType::fp16};
constexpr DType all_dtypes[] = {DType::fp32, DType::bf16, DType::fp16, DType::u8};

// Returns values of very different sizes, so that another order of additions gives other bits.
inline float value_of(std::size_t rank, std::size_t i) {
  const std::size_t random = (rank + 1) * 0x9E3779B97F4A7C15ull ^ (i + 1) * 0xC2B2AE3D27D4EB4Full;
  const auto sign_and_mantissa = static_cast<std::uint32_t>(random >> 24) & 0x807FFF00;
  const auto exponent = static_cast<std::uint32_t>(random >> 60) + 120;  // 2^-7 to 2^8
  return std::bit_cast<float>(sign_and_mantissa | exponent << 23);
}

// Elements of any format, as bytes.
class Values {
 public:
  Values(DType dtype, std::size_t count) : bytes_(count * byte_size(dtype)), dtype_(dtype), count_(count) {}

  static Values of_rank(std::size_t rank, DType dtype, std::size_t count) {
    Values values(dtype, count);
    for (std::size_t i = 0; i < count; ++i) {
      values.set(i, value_of(rank, i));
    }
    return values;
  }

  View view() { return {bytes_.data(), count_, dtype_}; }
  ConstView view() const { return {bytes_.data(), count_, dtype_}; }
  bool operator==(const Values&) const = default;

  void set(std::size_t i, float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    switch (dtype_) {
      case DType::fp32: return store(i, bits);
      case DType::bf16: return store(i, static_cast<std::uint16_t>(kernels::to_bf16(value)));
      case DType::fp16: return store(i, static_cast<std::uint16_t>(kernels::to_fp16(value)));
      case DType::u8: return store(i, static_cast<std::uint8_t>(bits >> 16));
    }
  }

  float get(std::size_t i) const {
    switch (dtype_) {
      case DType::fp32: return std::bit_cast<float>(load<std::uint32_t>(i));
      case DType::bf16: return kernels::from_bf16(std::uint32_t{load<std::uint16_t>(i)});
      case DType::fp16: return kernels::from_fp16(std::uint32_t{load<std::uint16_t>(i)});
      case DType::u8: break;
    }
    return load<std::uint8_t>(i);
  }

  // Copies the elements of `part` to those from `first` on.
  void put(std::size_t first, const Values& part) {
    std::ranges::copy(part.bytes_, bytes_.begin() + static_cast<std::ptrdiff_t>(first * byte_size(dtype_)));
  }

 private:
  // Copies a size that the compiler knows: a copy of any other size is a call, which a sanitizer checks byte by byte.
  template <class Bits>
  void store(std::size_t i, Bits bits) {
    std::memcpy(bytes_.data() + i * sizeof bits, &bits, sizeof bits);
  }

  template <class Bits>
  Bits load(std::size_t i) const {
    Bits bits;
    std::memcpy(&bits, bytes_.data() + i * sizeof bits, sizeof bits);
    return bits;
  }

  std::vector<std::byte> bytes_;
  DType dtype_;
  std::size_t count_;
};

// Returns memory for sums, which must overwrite all of it.
inline Values overwritten(std::size_t count, DType dtype = DType::fp32) {
  Values values(dtype, count);
  for (std::size_t i = 0; i < count; ++i) {
    values.set(i, std::numeric_limits<float>::quiet_NaN());
  }
  return values;
}

// The ranks that are added, each as many of a host first.
struct Summands {
  std::size_t ranks = 1;
  std::size_t ranks_per_host = 1;
  Summands(std::size_t of_group, std::size_t of_host = 1) : ranks(of_group), ranks_per_host(of_host) {}
};

// Returns the ranks' elements from `first` on, added in rank order: those of each host, and then the sums of the hosts.
inline Values summed(const Summands& summands, DType dtype, std::size_t first, std::size_t count) {
  Values sum(DType::fp32, count);
  Values one(dtype, 1);
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t host = 0; host < summands.ranks; host += summands.ranks_per_host) {
      float of_host = 0;
      for (std::size_t rank = host; rank < host + summands.ranks_per_host; ++rank) {
        one.set(0, value_of(rank, first + i));
        of_host += one.get(0);
      }
      sum.set(i, sum.get(i) + of_host);
    }
  }
  return sum;
}

// The same, rounded once to another format.
inline Values summed_and_rounded(const Summands& summands, DType dtype, std::size_t first, std::size_t count,
                                 DType into) {
  const Values sum = summed(summands, dtype, first, count);
  Values rounded(into, count);
  for (std::size_t i = 0; i < count; ++i) {
    rounded.set(i, sum.get(i));
  }
  return rounded;
}

}  // namespace ballast::testing
