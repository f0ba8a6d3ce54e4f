// Tests of products of matrices: they are near sums in double, and have the same bits from any number of threads.
#include "examples/llama/multiply.h"
#include "examples/llama/maths.h"
#include "tests/llama/differences.h"

using namespace ballast;
using namespace ballast::llama;
using namespace ballast::testing;

namespace {

// A matrix of random values in its own memory, with gaps between its rows.
struct Random {
  Random(std::size_t rows, std::size_t columns, DType dtype, bool transposed, std::uint64_t seed)
      : bytes((transposed ? columns : rows) * ((transposed ? rows : columns) + 3) * byte_size(dtype)) {
    const std::size_t stride = (transposed ? rows : columns) + 3;
    matrix = Matrix(View(bytes.data(), bytes.size() / byte_size(dtype), dtype), stride);
    matrix = matrix.part(0, transposed ? columns : rows, 0, transposed ? rows : columns);
    rows::write(random_floats(matrix.memory.count(), seed), matrix.memory, 0);
    if (transposed) matrix = matrix.transpose();
  }
  Random(const Random&) = delete;

  std::vector<std::byte> bytes;
  Matrix matrix;
};

template <class AnyMatrix>
double at(const AnyMatrix& matrix, std::size_t row, std::size_t column) {
  float value = 0;
  rows::read(matrix.memory, row * matrix.row_step() + column * matrix.column_step(), {&value, 1});
  return double{value};
}

double expected(const Product& product, const Matrix& before, std::size_t row, std::size_t column) {
  double sum = product.add ? at(before, row, column) : 0.0;
  for (std::size_t step = 0; step < product.a.columns; ++step) {
    sum += at(product.a, row, step) * at(product.b, step, column);
  }
  return sum;
}

// Makes products by `multiply`, and compares every element.
template <class Multiply>
void check_product(const Multiply& multiply, std::size_t rows, std::size_t columns, std::size_t steps) {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    for (const DType to : {dtype, DType::fp32}) {
      for (const unsigned kind : {0u, 1u, 2u, 3u, 4u, 5u, 6u, 7u}) {
        const bool add = (kind & 4) != 0;
        CAPTURE(name(dtype), name(to), kind, rows, columns, steps);
        const Random a(rows, steps, dtype, (kind & 1) != 0, 1), b(steps, columns, dtype, (kind & 2) != 0, 2);
        const Random before(rows, columns, to, false, 4);
        Random result(rows, columns, to, false, 4);
        const Product product{.a = a.matrix, .b = b.matrix, .to = result.matrix, .add = add};
        multiply(product);
        double worst = 0;
        for (std::size_t row = 0; row < rows; ++row) {
          for (std::size_t column = 0; column < columns; ++column) {
            worst = std::max(worst,
                             std::abs(at(result.matrix, row, column) - expected(product, before.matrix, row, column)));
          }
        }
        // The bound for values up to 1: the rounding of the result (twice where a sum is rounded first) and of the
        // fp32 sums.
        CHECK(worst <= (to == DType::bf16 ? 0.008 : 1e-6) * std::sqrt(static_cast<double>(steps)) * 2);
      }
    }
  }
}

}  // namespace

TEST_CASE("matrix products match their definition for all shapes, formats and transpositions") {
  const auto maths = cpu_maths(2);
  for (const auto& [rows, columns, steps] :
       {std::array<std::size_t, 3>{1, 1, 1}, {7, 19, 5}, {64, 48, 33}, {130, 20, 64}, {5, 1030, 16}}) {
    check_product([&](const Product& product) { maths->multiply(product); }, rows, columns, steps);
    check_product(multiply_on_this_thread, rows, columns, steps);
  }
}

TEST_CASE("a matrix product has the same bits for any number of threads and any alignment") {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    const std::size_t rows = 300, columns = 1100, steps = 400;
    const Random a(rows, steps, dtype, false, 1), b(steps, columns, dtype, true, 2);
    const auto product_of = [&](int threads, std::size_t offset) {
      std::vector<std::byte> memory(rows * columns * 4 + 64);
      const View to = View(memory.data() + offset, rows * columns, DType::fp32);
      cpu_maths(threads)->multiply({.a = a.matrix, .b = b.matrix, .to = Matrix(to, columns)});
      return std::vector<std::byte>(memory.begin() + std::ptrdiff_t(offset),
                                    memory.begin() + std::ptrdiff_t(offset + to.bytes()));
    };
    const auto expected_bytes = product_of(1, 0);
    for (const int threads : {1, 2, 3, 7}) {
      for (const std::size_t offset : {0u, 4u, 32u}) {
        CHECK((product_of(threads, offset) == expected_bytes));
      }
    }
  }
}
