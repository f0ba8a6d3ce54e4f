#include "examples/gpt/multiply_portable.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "examples/gpt/for_each_isa.h"
#include "examples/gpt/number.h"

namespace ballast::gpt {
namespace {

// A block of the result whose sums stay in registers: 12 of 16 with AVX2. Products and sums are rounded separately, so
// that every instruction set gives the same bits.
constexpr std::size_t block_rows = 6;
constexpr std::size_t block_columns = 16;
using Lanes [[gnu::vector_size(block_columns * sizeof(float))]] = float;
using Sums = std::array<std::array<float, block_columns>, block_rows>;

// `a` holds block_rows values for each step of the sum, `b` holds block_columns.
BALLAST_FOR_EACH_ISA void sum_block(const float* a, const float* b, std::size_t steps, Sums& sums) {
  Lanes now[block_rows] = {};
  for (std::size_t step = 0; step < steps; ++step, a += block_rows, b += block_columns) {
    Lanes row_of_b;
    std::memcpy(&row_of_b, b, sizeof(row_of_b));
    for (std::size_t row = 0; row < block_rows; ++row) {
      now[row] += a[row] * row_of_b;
    }
  }
  std::memcpy(&sums, now, sizeof(now));
}

// Interleaves `width` rows, so that each step of the sum reads consecutive values; pads with zeros.
void pack(const ConstMatrix& from, std::size_t first, std::size_t width, float* to) {
  const std::size_t count = std::min(width, from.rows - first);
  std::fill_n(to, width * from.columns, 0.0f);
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t step = 0; step < from.columns; ++step) {
      to[step * width + i] = number(from.memory, (first + i) * from.row_step() + step * from.column_step());
    }
  }
}

void store(const Sums& sums, const Product& product, std::size_t first_row, std::size_t first_column) {
  const Matrix& to = product.to;
  for (std::size_t row = 0; row < std::min(block_rows, to.rows - first_row); ++row) {
    for (std::size_t column = 0; column < std::min(block_columns, to.columns - first_column); ++column) {
      const std::size_t at = (first_row + row) * to.row_step() + (first_column + column) * to.column_step();
      float value = sums[row][column];
      if (product.bias.count() > 0) value += number(product.bias, first_column + column);
      set_number(to.memory, at, product.add ? value + number(to.memory, at) : value);
    }
  }
}

}  // namespace

void multiply_portable(const Product& product) {
  const std::size_t steps = product.a.columns;
  const ConstMatrix columns_of_b = transposed(product.b);
  const std::size_t row_blocks = (product.a.rows + block_rows - 1) / block_rows;
  std::vector<float> a(row_blocks * block_rows * steps);
  std::vector<float> b(block_columns * steps);
  for (std::size_t block = 0; block < row_blocks; ++block) {
    pack(product.a, block * block_rows, block_rows, a.data() + block * block_rows * steps);
  }
  for (std::size_t column = 0; column < product.to.columns; column += block_columns) {
    pack(columns_of_b, column, block_columns, b.data());
    for (std::size_t block = 0; block < row_blocks; ++block) {
      Sums sums;
      sum_block(a.data() + block * block_rows * steps, b.data(), steps, sums);
      store(sums, product, block * block_rows, column);
    }
  }
}

}  // namespace ballast::gpt
