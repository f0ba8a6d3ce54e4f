// The CPU walk of products of matrices, for any width of lanes S and any packing of factors: one block of a product. It packs a
// part of both factors into the caches, so that the innermost loop reads consecutive values, and keeps a tile of sums in
// registers.
#pragma once

#include <cstring>

#include "kernels/multiply.h"
#include "kernels/number_walk.h"
#include "kernels/simd/subnormals.h"

namespace ballast::kernels {

struct BlockShape {
  std::size_t rows;
  std::size_t columns;
  bool upper_half;  // only the upper half is needed: the block is on the diagonal of a symmetric product
};

// Continues the sums of a block.
template <class S, class Packing>
[[gnu::noinline]] void multiply_packed(BlockMemory& memory, const BlockShape& shape, std::size_t depth) {
  using Tile = ProductTile<S>;
  using Value = typename Packing::Value;
  const auto* const left = reinterpret_cast<const Value*>(memory.left);
  const auto* const right = reinterpret_cast<const Value*>(memory.right);
  const std::size_t values = Packing::values(block_depth);  // values of a row or a column
  for (std::size_t column = 0; column < shape.columns; column += Tile::columns) {
    for (std::size_t row = 0; row < shape.rows; row += Tile::rows) {
      if (shape.upper_half && row >= column + Tile::columns) break;
      Packing::multiply_tile(left + row * values, right + column * values, Packing::values(depth),
                             memory.sums + row * block_size + column);
    }
  }
}

// Rounds `count` sums into the elements of the product from `at` on.
template <class S>
void finish_row(const Product& product, const float* sums, std::size_t at, std::size_t count) {
  using F = typename S::F;
  const F alpha(product.alpha);
  const F beta(product.beta);
  const auto finish = [=](const float* sum, const std::uint16_t* added, std::uint16_t* to) {
    const F scaled = alpha * S::load(sum);
    S::store(to, to_bf16(added == nullptr ? scaled : fma(beta, as_float(S::load_high(added)), scaled)));
  };
  const std::uint16_t* const added = product.beta == 0.0f ? nullptr : product.added + at;
  std::uint16_t* const to = product.to + at;
  const std::size_t rest = count % S::width;
  const std::size_t whole = count - rest;
  for (std::size_t i = 0; i < whole; i += S::width) {
    finish(sums + i, added == nullptr ? nullptr : added + i, to + i);
  }
  if (rest > 0) {
    const Padded<S, float> last_sums(sums + whole, rest);
    Padded<S, std::uint16_t> last_added;
    Padded<S, std::uint16_t> last;
    if (added != nullptr) std::memcpy(last_added.at, added + whole, rest * sizeof *added);
    finish(last_sums.at, added == nullptr ? nullptr : last_added.at, last.at);
    std::memcpy(to + whole, last.at, rest * sizeof *to);
  }
}

// Copies a finished block to its place below the diagonal.
template <class S>
void mirror_block(const Product& product, const ProductBlock& block, const BlockShape& shape) {
  for (std::size_t i = 0; i < shape.rows; ++i) {
    const std::size_t row = block.row + i;
    for (std::size_t j = shape.upper_half ? i + 1 : 0; j < shape.columns; ++j) {
      const std::size_t column = block.column + j;
      product.to[column * product.columns + row] = product.to[row * product.columns + column];
    }
  }
}

// --- Factors in fp32, for instruction sets that multiply no bf16 values ---

// Writes whole vectors up to `padded` elements. Those beyond `count` are zeros.
template <class S>
void widen_row(const std::uint16_t* from, std::size_t count, float* to, std::size_t padded) {
  std::size_t i = 0;
  for (; i + S::width <= count; i += S::width) {
    S::store(to + i, as_float(S::load_high(from + i)));
  }
  for (; i < padded; i += S::width) {
    const Padded<S, std::uint16_t> last(from + i, i < count ? count - i : 0);
    S::store(to + i, as_float(S::load_high(last.at)));
  }
}

// Computes to[x * to_step + y] = from[y * from_step + x].
struct Transposition {
  const std::uint16_t* from;
  std::size_t from_step;
  float* to;
  std::size_t to_step;
};

template <class S>
void widen_transposed(const Transposition& t, std::size_t count_x, std::size_t count_y) {
  constexpr std::size_t patch = 16;  // the size of a patch in x and in y, so that it stays in the innermost cache
  for (std::size_t x0 = 0; x0 < count_x; x0 += patch) {
    const std::size_t x_end = x0 + patch < count_x ? x0 + patch : count_x;
    for (std::size_t y0 = 0; y0 < count_y; y0 += patch) {
      const std::size_t y_end = y0 + patch < count_y ? y0 + patch : count_y;
      for (std::size_t y = y0; y < y_end; ++y) {
        for (std::size_t x = x0; x < x_end; ++x) {
          const std::uint32_t pattern = std::uint32_t{t.from[y * t.from_step + x]} << 16;
          std::memcpy(t.to + x * t.to_step + y, &pattern, sizeof pattern);
        }
      }
    }
  }
}

// The next sum of a chain, by the instruction alone.
struct Sum {
  using Subnormals = simd::SubnormalsAreZero;
  template <class F>
  static F next(F a, F b, F sum) {
    return fma(a, b, sum);
  }
};

// The same in formulas, at several times the cost, where the processor makes too many zeros, or none. The sum of scaled terms,
// whose exponent is never that of a subnormal number, tells whether the rounded sum is one. What overflows there is none.
struct SumWithoutSubnormals {
  using Subnormals = simd::SubnormalsStay;
  template <class F>
  static F next(F a, F b, F sum) {
    using U = BitsOf<F>;
    const auto zero_if = [](auto is_small, F x) { return select(is_small, as_float(bits(x) & U(0x80000000u)), x); };
    const auto normal = [&](F x) { return zero_if(none_of(bits(x), U(0x7f800000u)), x); };
    const F left = normal(a), right = normal(b), scale(0x1p64f);
    const F scaled = fma(left * scale, right, sum * scale);
    return zero_if(below(magnitude(scaled), F(0x1p-62f)), fma(left, right, sum));
  }
};

template <class S, class Sums = Sum>
struct WidenedFactors {
  using Subnormals = typename Sums::Subnormals;
  using Value = float;
  using F = typename S::F;
  using Tile = ProductTile<S>;

  // Returns the values that each row or column takes: every first element has a second one.
  static constexpr std::size_t values(std::size_t depth) { return depth + depth % 2; }

  // Packs rows at a distance of block_depth.
  static void pack_left(const Factor& from, std::size_t rows, std::size_t depth, float* to) {
    if (from.column_step == 1) {
      for (std::size_t row = 0; row < rows; ++row) {
        widen_row<S>(from.data + row * from.row_step, depth, to + row * block_depth, values(depth));
      }
    } else {
      widen_transposed<S>({from.data, from.column_step, to, block_depth}, rows, depth);
      for (std::size_t row = 0; depth % 2 == 1 && row < rows; ++row) {
        to[row * block_depth + depth] = 0.0f;
      }
    }
    const std::size_t unfilled = (Tile::rows - rows % Tile::rows) % Tile::rows;
    std::memset(to + rows * block_depth, 0, unfilled * block_depth * sizeof(float));
  }

  // Packs strips as wide as a tile, each by rows.
  static void pack_right(const Factor& from, std::size_t columns, std::size_t depth, float* to) {
    constexpr std::size_t width = Tile::columns;
    for (std::size_t first = 0; first < columns; first += width, to += width * block_depth) {
      const std::size_t count = columns - first < width ? columns - first : width;
      const std::uint16_t* const strip = from.data + first * from.column_step;
      if (from.column_step == 1) {
        for (std::size_t k = 0; k < depth; ++k) {
          widen_row<S>(strip + k * from.row_step, count, to + k * width, width);
        }
      } else {
        if (count < width) std::memset(to, 0, depth * width * sizeof(float));
        widen_transposed<S>({strip, from.column_step, to, width}, depth, count);
      }
      if (depth % 2 == 1) std::memset(to + depth * width, 0, width * sizeof(float));
    }
  }

  // Continues the sums of one tile.
  static void multiply_tile(const float* left, const float* right, std::size_t depth, float* sums) {
    F now[Tile::rows][Tile::vectors];
    for (std::size_t row = 0; row < Tile::rows; ++row) {
      for (std::size_t i = 0; i < Tile::vectors; ++i) {
        now[row][i] = S::load(sums + row * block_size + i * S::width);
      }
    }
    const auto add = [&](std::size_t k) {
      F of_right[Tile::vectors];
      for (std::size_t i = 0; i < Tile::vectors; ++i) {
        of_right[i] = S::load(right + k * Tile::columns + i * S::width);
      }
      for (std::size_t row = 0; row < Tile::rows; ++row) {
        const F of_left(left[row * block_depth + k]);
        for (std::size_t i = 0; i < Tile::vectors; ++i) {
          now[row][i] = Sums::next(of_left, of_right[i], now[row][i]);
        }
      }
    };
    for (std::size_t k = 0; k < depth; k += 2) {
      add(k + 1);
      add(k);
    }
    for (std::size_t row = 0; row < Tile::rows; ++row) {
      for (std::size_t i = 0; i < Tile::vectors; ++i) {
        S::store(sums + row * block_size + i * S::width, now[row][i]);
      }
    }
  }
};

// --- Blocks ---

// Sums the products of a block. Returns whether the sums are as multiply.h says.
template <class S, class Packing>
bool sum_block(const Product& product, const ProductBlock& block, const BlockShape& shape, BlockMemory& memory) {
  using Value = typename Packing::Value;
  std::memset(memory.sums, 0, sizeof memory.sums);
  for (std::size_t k = 0; k < product.inner; k += block_depth) {
    const std::size_t depth = product.inner - k < block_depth ? product.inner - k : block_depth;
    Packing::pack_left(part(product.left, block.row, k), shape.rows, depth, reinterpret_cast<Value*>(memory.left));
    Packing::pack_right(part(product.right, k, block.column), shape.columns, depth,
                        reinterpret_cast<Value*>(memory.right));
    const typename Packing::Subnormals in_sums;
    multiply_packed<S, Packing>(memory, shape, depth);
    if (!in_sums.holds()) return false;
  }
  return true;
}

// Computes a block of one matrix. Of a symmetric product, its column is at or after its row.
template <class S, class Packing>
void multiply_block(const Product& product, const ProductBlock& block, BlockMemory& memory) {
  const auto within = [](std::size_t most, std::size_t left) { return left < most ? left : most; };
  const BlockShape shape{within(block.size, product.rows - block.row),
                         within(block.size, product.columns - block.column),
                         product.symmetric && block.row == block.column};
  const bool holds = sum_block<S, Packing>(product, block, shape, memory);
  if constexpr (!Packing::Subnormals::always_holds) {
    if (!holds) sum_block<S, WidenedFactors<S, SumWithoutSubnormals>>(product, block, shape, memory);
  }
  for (std::size_t row = 0; row < shape.rows; ++row) {
    const std::size_t first = shape.upper_half ? row : 0;
    finish_row<S>(product, memory.sums + row * block_size + first,
                  (block.row + row) * product.columns + block.column + first, shape.columns - first);
  }
  if (product.symmetric) mirror_block<S>(product, block, shape);
}

}  // namespace ballast::kernels
