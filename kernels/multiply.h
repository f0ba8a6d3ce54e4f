// Products of bf16 matrices, and how a CPU divides them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::kernels {

// A factor of a product, in bf16. One of the steps is 1.
struct Factor {
  const std::uint16_t* data = nullptr;
  std::size_t row_step = 0;
  std::size_t column_step = 1;
};

constexpr Factor part(const Factor& factor, std::size_t row, std::size_t column) {
  return {factor.data + row * factor.row_step + column * factor.column_step, factor.row_step, factor.column_step};
}

constexpr Factor transposed(const Factor& factor) { return {factor.data, factor.column_step, factor.row_step}; }

// Computes to = alpha * left * right + beta * added for each of `count` matrices, summed in fp32 and rounded once to
// bf16. The matrices of each argument lie one after the other, without gaps; `to` and `added` by rows. The memory of
// `to` is apart from the rest.
//
// A sum is one chain of fused multiply-adds, in which numbers that are subnormal after rounding count as zeros. Of each two
// elements of the inner dimension the second comes first: so does the instruction of AVX512-BF16, which is twice as fast as others.
struct Product {
  std::size_t rows = 0;
  std::size_t inner = 0;
  std::size_t columns = 0;
  std::size_t count = 1;
  Factor left;
  Factor right;
  std::uint16_t* to = nullptr;
  const std::uint16_t* added = nullptr;  // not read if beta is zero
  float alpha = 1.0f;
  float beta = 0.0f;
  bool symmetric = false;  // the product and `added` equal their transposes: a CPU computes one half
};

// What a task of a CPU computes: the rows and columns of one matrix from these on, `size` of them, or those that are left.
struct ProductBlock {
  std::size_t row = 0;
  std::size_t column = 0;
  std::size_t size = 0;
};

// Multiples of the tiles that any instruction set keeps in registers. No bits depend on these.
inline constexpr std::size_t block_size = 192;       // the largest
inline constexpr std::size_t small_block_size = 96;  // the size if there are few matrices, so that each thread has work
inline constexpr std::size_t block_depth = 256;      // the part of the inner dimension that is packed at once

// What a task keeps in the caches: packed parts of both factors, and its sums.
struct BlockMemory {
  alignas(64) std::byte left[block_size * block_depth * sizeof(float)];
  alignas(64) std::byte right[block_size * block_depth * sizeof(float)];
  alignas(64) float sums[block_size * block_size];
};

// The sums of a product that stay in registers, as vectors of lanes S. They take 12 of 16 registers with AVX2, 24 of 32 with
// AVX-512 and NEON.
template <class S>
struct ProductTile {
  static constexpr std::size_t vectors = S::width == 1 ? 16 : S::width == 4 ? 4 : 2;
  static constexpr std::size_t rows = S::width == 16 ? 12 : S::width == 1 ? 4 : 6;
  static constexpr std::size_t columns = vectors * S::width;
  static_assert(block_size % rows == 0 && block_size % columns == 0);
};

}  // namespace ballast::kernels
