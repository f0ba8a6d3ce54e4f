#include <algorithm>
#include <memory>
#include <vector>

#include "benchmarks/harness/buffer.h"
#include "benchmarks/kernels/subjects.h"
#include "examples/gpt/multiply.h"
#include "kernels/cpu.h"

namespace ballast::benchmarks {
namespace {

constexpr std::size_t steps = 5;
constexpr float coefficients[] = {3.4445f, -4.7750f, 2.0315f};

// Values of both signs, near the size of those that are multiplied.
class Values {
 public:
  Values(std::size_t count, DType dtype = DType::bf16)
      : buffer_(count * byte_size(dtype)), view_(buffer_.data(), count, dtype) {
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) {
      values[i] = static_cast<float>(static_cast<int>(i * 7919 % 2001) - 1000) * 1e-4f;
    }
    kernels::cpu_backend({.threads = 1})->cast(ConstView(std::span<const float>(values)), view_);
  }

  const View& view() const { return view_; }
  std::uint16_t* halves() const { return reinterpret_cast<std::uint16_t*>(buffer_.data()); }

 private:
  Buffer buffer_;
  View view_;
};

double billions(const ProductSizes& sizes) {
  return 2e-9 * static_cast<double>(sizes.rows) * static_cast<double>(sizes.inner) * static_cast<double>(sizes.columns);
}

// The products of a step: of the wide matrix X, X X^T, its square, and that by X.
std::vector<ProductSizes> products_of(const kernels::MatrixShape& shape) {
  const std::size_t side = std::min(shape.rows, shape.columns);
  const std::size_t length = std::max(shape.rows, shape.columns);
  return {{side, length, side}, {side, side, side}, {side, side, length}};
}

double billions(const kernels::MatrixShape& shape) {
  double all = 0;
  for (const ProductSizes& sizes : products_of(shape)) {
    all += static_cast<double>(steps) * billions(sizes);
  }
  return all;
}

}  // namespace

Subject product(const ProductSizes& sizes) {
  struct Parts {
    explicit Parts(const ProductSizes& sizes)
        : left(sizes.rows * sizes.inner), right(sizes.inner * sizes.columns), to(sizes.rows * sizes.columns) {}

    kernels::Cpu cpu = kernels::cpu_of({.threads = 1});
    std::vector<kernels::BlockMemory> memory = std::vector<kernels::BlockMemory>(1);
    Values left, right, to;
  };
  const auto parts = std::make_shared<Parts>(sizes);
  const kernels::Factor left{parts->left.halves(), sizes.inner, 1};
  const kernels::Factor right{parts->right.halves(), sizes.columns, 1};
  const kernels::Product task{.rows = sizes.rows,
                              .inner = sizes.inner,
                              .columns = sizes.columns,
                              .left = left,
                              .right = sizes.symmetric ? transposed(left) : right,
                              .to = parts->to.halves(),
                              .symmetric = sizes.symmetric};
  return {.work = billions(sizes), .run = [parts, task] { kernels::multiply(parts->cpu, task, parts->memory); }};
}

Subject product_by_library(const ProductSizes& sizes, DType dtype) {
  struct Parts {
    Parts(const ProductSizes& sizes, DType dtype)
        : left(sizes.rows * sizes.inner, dtype),
          right(sizes.inner * sizes.columns, dtype),
          to(sizes.rows * sizes.columns, dtype) {}

    gpt::Multiplier multiply;
    Values left, right, to;
  };
  const auto parts = std::make_shared<Parts>(sizes, dtype);
  const auto run = [parts, sizes] {
    const gpt::ConstMatrix left = gpt::matrix(ConstView(parts->left.view()), sizes.inner);
    const gpt::ConstMatrix right = gpt::matrix(ConstView(parts->right.view()), sizes.columns);
    parts->multiply(
        {left, sizes.symmetric ? gpt::transposed(left) : right, gpt::matrix(parts->to.view(), sizes.columns)});
  };
  return {.work = billions(sizes), .run = run};
}

Subject orthogonalization(const kernels::MatrixShape& shape) {
  struct Parts {
    explicit Parts(const kernels::MatrixShape& shape)
        : on(kernels::cpu_orthogonalizer({.threads = 1})),
          matrices(shape.elements()),
          workspace(on->workspace_bytes(shape)) {}

    std::unique_ptr<kernels::Orthogonalizer> on;
    Values matrices;
    Buffer workspace;  // whole pages
  };
  const auto parts = std::make_shared<Parts>(shape);
  const auto run = [parts, shape] {
    const kernels::Quintic step{coefficients[0], coefficients[1], coefficients[2]};
    (*parts->on)(parts->matrices.view(), shape, {.steps = std::vector(steps, step)},
                 {parts->workspace.data(), parts->workspace.bytes(), DType::u8});
  };
  return {.work = billions(shape), .run = run};
}

Subject orthogonalization_by_library(const kernels::MatrixShape& shape) {
  std::vector<std::function<void()>> products;
  for (const ProductSizes& sizes : products_of(shape)) {
    products.push_back(product_by_library(sizes, DType::bf16).run);
  }
  const auto run = [products] {
    for (std::size_t step = 0; step < steps; ++step) {
      for (const auto& product : products) {
        product();
      }
    }
  };
  return {.work = billions(shape), .run = run};
}

}  // namespace ballast::benchmarks
