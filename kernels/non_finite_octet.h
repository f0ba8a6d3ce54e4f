// The search for the first NaN or infinity among a thread's elements.
#pragma once

#include "kernels/number_octet.h"

namespace ballast::kernels {

constexpr std::uint32_t infinity_of(DType dtype) {
  switch (dtype) {
    case DType::bf16: return Bf16Format::infinity;
    case DType::fp16: return Fp16Format::infinity;
    default: return Fp32Format::infinity;
  }
}

// `index` is the index of the first element. Returns UINT64_MAX if all elements are finite.
constexpr std::uint64_t first_non_finite_of(const Octet& patterns, std::uint32_t infinity, std::uint64_t index) {
  for (std::size_t i = 0; i < octet_size; ++i) {
    if ((patterns.at[i] & infinity) == infinity) {
      return index + i;
    }
  }
  return UINT64_MAX;
}

}  // namespace ballast::kernels
