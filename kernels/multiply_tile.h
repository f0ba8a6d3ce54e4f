// The sums of a product that stay in registers.
#pragma once

#include "kernels/multiply.h"

namespace ballast::kernels {

// Of vectors of lanes S: 12 of 16 registers with AVX2, 24 of 32 with AVX-512.
template <class S>
struct ProductTile {
  static constexpr std::size_t vectors = S::width == 1 ? 16 : 2;
  static constexpr std::size_t rows = S::width == 16 ? 12 : S::width == 8 ? 6 : 4;
  static constexpr std::size_t columns = vectors * S::width;
  static_assert(block_size % rows == 0 && block_size % columns == 0);
};

}  // namespace ballast::kernels
