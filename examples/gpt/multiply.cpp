#include "examples/gpt/multiply.h"

#include <algorithm>
#include <vector>

#include "examples/gpt/rows.h"

namespace ballast::gpt {
namespace {

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

// Returns the values of a matrix of fp32 without gaps, row after row.
Floats by_rows(const ConstMatrix& from) {
  const auto values = from.memory.as<float>();
  if (!from.transposed) return {values.begin(), values.end()};
  Floats turned(values.size());
  for (std::size_t row = 0; row < from.rows; ++row) {
    for (std::size_t column = 0; column < from.columns; ++column) {
      turned[row * from.columns + column] = values[column * from.rows + row];
    }
  }
  return turned;
}

}  // namespace

void multiply_portable(const Product& product) {
  multiply_widened(product, [](const Product& piece) {
    const std::size_t columns = piece.to.columns, depth = piece.a.columns;
    const Floats a = by_rows(piece.a), b = by_rows(piece.b);
    for (std::size_t row = 0; row < piece.to.rows; ++row) {
      const rows::Row sums = piece.to.memory.as<float>().subspan(row * columns, columns);
      rows::add_product(sums, rows::ConstRow(a).subspan(row * depth, depth), b);
    }
  });
}

void multiply_widened(const Product& product, const std::function<void(const Product&)>& multiply) {
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
