#include "examples/gpt/multiply.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "examples/gpt/number.h"
#include "examples/gpt/rows.h"

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

using Floats = std::vector<float>;

// The depth of the factors that is widened at a time, so that the memory of a thread does not grow with the model. The
// bits of a product depend on it.
constexpr std::size_t depth_at_once = 1024;

// The widened values of a matrix, in its order, without gaps between the rows.
class Widened {
 public:
  explicit Widened(const ConstMatrix& from) : from_(from), values_(from.rows * from.columns) {
    for (std::size_t row = 0; row < values_.size() / width(); ++row) {
      rows::read(from.memory, row * from.stride, rows::Row(values_).subspan(row * width(), width()));
    }
  }

  ConstMatrix matrix() const {
    return {ConstView(std::span(values_)), from_.rows, from_.columns, width(), from_.transposed};
  }

 private:
  std::size_t width() const { return from_.transposed ? from_.rows : from_.columns; }  // columns in memory

  ConstMatrix from_;
  Floats values_;
};

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

void multiply_widened(const Product& product, const Multiplier& multiply) {
  const Matrix& to = product.to;
  Floats result(to.rows * to.columns), bias(to.columns);
  for (std::size_t first = 0; first < product.a.columns; first += depth_at_once) {
    const std::size_t depth = std::min(depth_at_once, product.a.columns - first);
    const Widened a(product.a.part(0, to.rows, first, depth)), b(product.b.part(first, depth, 0, to.columns));
    multiply({.a = a.matrix(), .b = b.matrix(), .to = matrix(View(std::span(result)), to.columns), .add = first > 0});
  }
  if (product.bias.count() > 0) rows::read(product.bias, 0, bias);
  for (std::size_t i = 0; i < to.rows; ++i) {
    const rows::Row row = rows::Row(result).subspan(i * to.columns, to.columns);
    rows::add(row, bias);
    product.add ? rows::add_to(to.memory, i * to.stride, row) : rows::write(row, to.memory, i * to.stride);
  }
}

}  // namespace ballast::gpt
