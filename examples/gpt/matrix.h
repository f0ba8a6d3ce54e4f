// Matrices in memory that the caller owns, and their product.
#pragma once

#include <ballast/view.h>

namespace ballast::gpt {

// Stored by rows, which begin `stride` elements apart. If transposed, a row of the matrix is a column of the memory.
template <class AnyView>
struct BasicMatrix {
  AnyView memory{};
  std::size_t rows = 0;
  std::size_t columns = 0;
  std::size_t stride = 0;
  bool transposed = false;

  DType dtype() const { return memory.dtype(); }
  std::size_t row_step() const { return transposed ? 1 : stride; }
  std::size_t column_step() const { return transposed ? stride : 1; }
  auto* data() const { return memory.data(); }

  // Returns the elements from the first to the last one of the part. Rows need not fill their stride.
  BasicMatrix part(std::size_t row, std::size_t row_count, std::size_t column, std::size_t column_count) const {
    const std::size_t first = row * row_step() + column * column_step();
    const std::size_t last = (row_count - 1) * row_step() + (column_count - 1) * column_step();
    return {memory.part(first, last + 1), row_count, column_count, stride, transposed};
  }
};

using ConstMatrix = BasicMatrix<ConstView>;
using Matrix = BasicMatrix<View>;

inline ConstMatrix readable(const Matrix& matrix) {
  return {matrix.memory, matrix.rows, matrix.columns, matrix.stride, matrix.transposed};
}

inline ConstMatrix matrix(const ConstView& memory, std::size_t columns) {
  return {memory, memory.count() / columns, columns, columns};
}

inline Matrix matrix(const View& memory, std::size_t columns) {
  return {memory, memory.count() / columns, columns, columns};
}

// Returns matrix(memory, columns) transposed, which has `columns` rows.
inline ConstMatrix transposed(const ConstView& memory, std::size_t columns) {
  return {memory, columns, memory.count() / columns, columns, true};
}

inline ConstMatrix transposed(const ConstMatrix& matrix) {
  return {matrix.memory, matrix.columns, matrix.rows, matrix.stride, !matrix.transposed};
}

// Computes to = a b + bias, or to += a b + bias. Factors are of one format, and sums are made in fp32.
struct Product {
  ConstMatrix a;
  ConstMatrix b;
  Matrix to;
  ConstView bias{};  // a value for each column, in the format of the factors; empty: zeros
  bool add = false;

  double operations() const {
    return 2.0 * static_cast<double>(to.rows) * static_cast<double>(to.columns) * static_cast<double>(a.columns);
  }
};

}  // namespace ballast::gpt
