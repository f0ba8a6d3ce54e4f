// Factors of a product in fp32, for instruction sets that multiply no bf16 values.
#pragma once

#include <cstring>

#include "kernels/multiply.h"
#include "kernels/number_walk.h"

namespace ballast::kernels {

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

// to[x * to_step + y] = from[y * from_step + x]
struct Transposition {
  const std::uint16_t* from;
  std::size_t from_step;
  float* to;
  std::size_t to_step;
};

template <class S>
void widen_transposed(const Transposition& t, std::size_t count_x, std::size_t count_y) {
  constexpr std::size_t patch = 16;  // of both, so that a patch stays in the innermost cache
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

template <class S>
struct WidenedFactors {
  using Value = float;
  using F = typename S::F;
  using Tile = ProductTile<S>;

  // Of each row or column: there is a second element to each first one.
  static constexpr std::size_t values(std::size_t depth) { return depth + depth % 2; }

  // By rows, at a distance of block_depth.
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

  // In strips as wide as a tile, each by rows.
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
          now[row][i] = fma(of_left, of_right[i], now[row][i]);
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

}  // namespace ballast::kernels
