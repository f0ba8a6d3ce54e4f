// Tests of Newton-Schulz iterations: against doubles, and bit by bit.
#include "kernels/orthogonalize.h"

#include <cmath>
#include <cstring>
#include <random>

#include "kernels/runtime/buffer.h"
#include "kernels/runtime/stream.h"
#include "tests/kernels/device_backends.h"
#include "tests/sanitizer.h"

namespace ballast::kernels {
namespace {

using Halves = std::vector<std::uint16_t>;
using Doubles = std::vector<double>;

const Quintic muon_step{3.4445f, -4.7750f, 2.0315f};

NewtonSchulz steps(std::size_t count) { return {.steps = std::vector<Quintic>(count, muon_step)}; }

double value(std::uint16_t half) { return double{from_bf16(std::uint32_t{half})}; }

// Gradients as they are: some directions are much larger than others.
Halves random_matrices(const MatrixShape& shape, std::uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Halves halves;
  for (std::size_t i = 0; i < shape.elements(); ++i) {
    const float size = i / shape.columns % 3 == 0 ? 1e-3f : 3e-5f;
    halves.push_back(static_cast<std::uint16_t>(to_bf16(size * normal(random))));
  }
  return halves;
}

Halves orthogonalized(Orthogonalizer& on, Halves matrices, const MatrixShape& shape, const NewtonSchulz& how) {
  const std::size_t bytes = on.workspace_bytes(shape);
  const std::unique_ptr<std::byte[], void (*)(std::byte*)> workspace(
      new (std::align_val_t{workspace_alignment}) std::byte[bytes],
      [](std::byte* memory) { ::operator delete[](memory, std::align_val_t{workspace_alignment}); });
  on({reinterpret_cast<std::byte*>(matrices.data()), matrices.size(), DType::bf16}, shape, how,
     {workspace.get(), bytes, DType::u8});
  return matrices;
}

// X of one matrix, after the steps, in doubles.
class Exact {
 public:
  Exact(const std::uint16_t* matrix, const MatrixShape& shape) : rows_(shape.rows), columns_(shape.columns) {
    double squares = 0;
    for (std::size_t i = 0; i < rows_ * columns_; ++i) {
      x_.push_back(value(matrix[i]));
      squares += x_.back() * x_.back();
    }
    for (double& x : x_) {
      x /= std::max(std::sqrt(squares), 1e-7);
    }
  }

  void take(const Quintic& step) {
    const Doubles gram = product(x_, rows_, transposed(x_, rows_, columns_), rows_);
    Doubles update = product(gram, rows_, gram, rows_);
    for (std::size_t i = 0; i < update.size(); ++i) {
      update[i] = double{step.b} * gram[i] + double{step.c} * update[i];
    }
    const Doubles moved = product(update, rows_, x_, columns_);
    for (std::size_t i = 0; i < x_.size(); ++i) {
      x_[i] = double{step.a} * x_[i] + moved[i];
    }
  }

  const Doubles& values() const { return x_; }

 private:
  static Doubles transposed(const Doubles& x, std::size_t rows, std::size_t columns) {
    Doubles result(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      result[i % columns * rows + i / columns] = x[i];
    }
    return result;
  }
  static Doubles product(const Doubles& a, std::size_t rows, const Doubles& b, std::size_t columns) {
    const std::size_t inner = a.size() / rows;
    Doubles to(rows * columns);
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t k = 0; k < inner; ++k) {
        for (std::size_t j = 0; j < columns; ++j) {
          to[i * columns + j] += a[i * inner + k] * b[k * columns + j];
        }
      }
    }
    return to;
  }

  std::size_t rows_;
  std::size_t columns_;
  Doubles x_;
};

// The norm of the difference, relative to that of the exact matrices.
double distance(const Halves& got, const Doubles& exact) {
  double difference = 0, all = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    difference += (value(got[i]) - exact[i]) * (value(got[i]) - exact[i]);
    all += exact[i] * exact[i];
  }
  return std::sqrt(difference / all);
}

Doubles in_doubles(const Halves& matrices, const MatrixShape& shape, const NewtonSchulz& how) {
  Doubles all;
  for (std::size_t i = 0; i < shape.count; ++i) {
    Exact exact(matrices.data() + i * shape.rows * shape.columns, shape);
    for (const Quintic& step : how.steps) {
      exact.take(step);
    }
    all.insert(all.end(), exact.values().begin(), exact.values().end());
  }
  return all;
}

const std::vector<MatrixShape> shapes{{1, 1}, {1, 9}, {9, 1}, {8, 12}, {33, 20}, {64, 64}, {16, 100, 3}, {100, 16, 2}};

// Each product rounds to bf16 (2^-9 at most), three times a step; a step enlarges errors of small singular values.
constexpr double tolerance = 0.03;

void check_against_doubles(Orthogonalizer& on) {
  for (const MatrixShape& shape : shapes) {
    for (const std::size_t count : {0u, 1u, 2u, 5u}) {
      const Halves matrices = random_matrices(shape);
      const double error =
          distance(orthogonalized(on, matrices, shape, steps(count)), in_doubles(matrices, shape, steps(count)));
      INFO(shape.rows << " x " << shape.columns << " x " << shape.count << ", " << count << " steps");
      CHECK(error < (count == 0 ? 0x1p-8 : tolerance));
    }
  }
}

Halves transposed(const Halves& matrix, std::size_t columns) {
  Halves to(matrix.size());
  for (std::size_t i = 0; i < matrix.size(); ++i) {
    to[i % columns * (matrix.size() / columns) + i / columns] = matrix[i];
  }
  return to;
}

// Matrices in a GPU's memory.
Halves on_gpu(const Halves& matrices, const MatrixShape& shape, const NewtonSchulz& how) {
  MemoryAccounts accounts;
  Stream stream;
  const std::unique_ptr<Orthogonalizer> on = cuda_orthogonalizer(stream.handle());
  const auto allocate_bytes = [&](std::size_t bytes) {
    return ballast::allocate(accounts, {.kind = MemoryKind::device, .bytes = bytes, .owner = "test"});
  };
  Buffer memory = allocate_bytes(matrices.size() * 2);
  Buffer workspace = allocate_bytes(on->workspace_bytes(shape));
  copy(memory.data(), matrices.data(), matrices.size() * 2, stream);
  (*on)({memory.data(), matrices.size(), DType::bf16}, shape, how, {workspace.data(), workspace.bytes(), DType::u8});
  Halves result(matrices.size());
  copy(result.data(), memory.data(), matrices.size() * 2, stream);
  stream.synchronize();
  return result;
}

}  // namespace

TEST_CASE("orthogonalized matrices agree with doubles") { check_against_doubles(*cpu_orthogonalizer({.threads = 2})); }

TEST_CASE("singular values move as the steps say") {
  Halves diagonal(4 * 4);
  for (std::size_t i = 0; i < 4; ++i) {
    diagonal[i * 5] = static_cast<std::uint16_t>(to_bf16(std::ldexp(1.0f, -static_cast<int>(i))));
  }
  const Halves result = orthogonalized(*cpu_orthogonalizer({.threads = 1}), diagonal, {4, 4}, steps(5));
  for (std::size_t i = 0; i < 16; ++i) {
    CHECK((i % 5 == 0 ? value(result[i]) > 0.65 && value(result[i]) < 1.25 : result[i] == 0));
  }
}

TEST_CASE("orthogonalized matrices have the same bits on every instruction set and any number of threads") {
  const MatrixShape shape{130, 210, 2};
  const Halves matrices = random_matrices(shape);
  const Halves expected = orthogonalized(*cpu_orthogonalizer({.threads = 1}), matrices, shape, steps(2));
  for (const simd::Isa isa : simd::usable_isas()) {
    for (const int threads : {1, 2, 7}) {
      INFO(simd::name(isa) << ", " << threads << " threads");
      const auto on = cpu_orthogonalizer({.threads = threads, .isa = isa});
      CHECK((orthogonalized(*on, matrices, shape, steps(2)) == expected));
    }
  }
}

TEST_CASE("a matrix has the same bits alone and among others, and transposed") {
  const MatrixShape shape{20, 50, 3};
  const auto on = cpu_orthogonalizer({.threads = 2});
  const Halves matrices = random_matrices(shape);
  const Halves together = orthogonalized(*on, matrices, shape, steps(5));
  for (std::size_t i = 0; i < shape.count; ++i) {
    const auto part_of = [&](const Halves& all) {
      return Halves(all.begin() + static_cast<std::ptrdiff_t>(i * 1000),
                    all.begin() + static_cast<std::ptrdiff_t>(i * 1000 + 1000));
    };
    CHECK((orthogonalized(*on, part_of(matrices), {20, 50}, steps(5)) == part_of(together)));
    const Halves tall = orthogonalized(*on, transposed(part_of(matrices), 50), {50, 20}, steps(5));
    CHECK((tall == transposed(part_of(together), 50)));
  }
}

TEST_CASE("a matrix of zeros stays zero, a small norm counts as eps, and a NaN makes its matrix NaN") {
  const auto on = cpu_orthogonalizer({.threads = 1});
  CHECK((orthogonalized(*on, Halves(2 * 6), {6, 2}, steps(5)) == Halves(2 * 6)));
  NewtonSchulz none = steps(0);
  none.eps = 2.0f;
  none.norm_factor = 1.5f;
  const auto ones = [](float x) { return Halves(4, static_cast<std::uint16_t>(to_bf16(x))); };
  CHECK((orthogonalized(*on, ones(0.5f), {2, 2}, none) == ones(0.25f)));     // norm 1 x 1.5, below eps
  CHECK((orthogonalized(*on, ones(2.0f), {2, 2}, none) == ones(2.0f / 6)));  // norm 4 x 1.5
  Halves pair = random_matrices({3, 4, 2});
  const Halves second(pair.begin() + 12, pair.end());
  pair[5] = 0x7fc0;
  const Halves result = orthogonalized(*on, pair, {3, 4, 2}, steps(5));
  CHECK(std::all_of(result.begin(), result.begin() + 12, [](std::uint16_t x) { return std::isnan(value(x)); }));
  CHECK((Halves(result.begin() + 12, result.end()) == orthogonalized(*on, second, {3, 4}, steps(5))));
}

TEST_CASE("orthogonalization refuses unsupported arguments") {
  const auto on = cpu_orthogonalizer({.threads = 1});
  const MatrixShape shape{4, 6};
  const std::size_t bytes = on->workspace_bytes(shape);
  alignas(256) static std::byte memory[2 << 20];
  REQUIRE(bytes + 2048 < sizeof memory);
  const auto code_of = [&](const View& matrices, const View& workspace, const NewtonSchulz& how) {
    try {
      (*on)(matrices, shape, how, workspace);
    } catch (const UsageError& error) {
      return error.code();
    }
    return Code::internal;
  };
  const View matrices(memory, 24, DType::bf16);
  const View workspace(memory + 1024, bytes, DType::u8);
  CHECK(code_of(matrices, workspace, steps(5)) == Code::internal);  // nothing is refused
  CHECK(code_of({memory, 24, DType::fp32}, workspace, steps(5)) == Code::wrong_dtype);
  CHECK(code_of({memory, 23, DType::bf16}, workspace, steps(5)) == Code::wrong_size);
  CHECK(code_of(matrices, {memory + 1024, bytes - 1, DType::u8}, steps(5)) == Code::wrong_size);
  CHECK(code_of(matrices, {memory + 1025, bytes, DType::u8}, steps(5)) == Code::unaligned);
  CHECK(code_of(matrices, {memory, bytes, DType::u8}, steps(5)) == Code::bad_argument);
  CHECK(code_of(matrices, workspace, steps(100)) == Code::bad_argument);
  CHECK(code_of(matrices, workspace, {.steps = {{NAN, 0, 0}}}) == Code::bad_argument);
  CHECK(code_of(matrices, workspace, {.steps = {}, .eps = -1.0f}) == Code::bad_argument);
  CHECK(code_of(matrices, workspace, {.steps = {}, .norm_factor = 0.0f}) == Code::bad_argument);
}

TEST_CASE("CUDA orthogonalizes matrices as doubles do, and gives the same bits again", "[gpu]") {
  for (const MatrixShape& shape : shapes) {
    const Halves matrices = random_matrices(shape);
    const Halves result = on_gpu(matrices, shape, steps(5));
    CHECK(distance(result, in_doubles(matrices, shape, steps(5))) < tolerance);
    CHECK((on_gpu(matrices, shape, steps(5)) == result));
  }
}

TEST_CASE("CUDA divides matrices by their norms with the bits of CPUs", "[gpu]") {
  const MatrixShape shape{70, 33, 3};
  const Halves matrices = random_matrices(shape);
  CHECK((on_gpu(matrices, shape, steps(0)) ==
         orthogonalized(*cpu_orthogonalizer({.threads = 1}), matrices, shape, steps(0))));
}

TEST_CASE("requesting an orthogonalizer on a GPU that is missing fails with the reason") {
  if (device::list().empty()) {
    CHECK_THROWS_WITH(cuda_orthogonalizer(nullptr), Catch::Contains("B2101") || Catch::Contains("B2102"));
  }
}

}  // namespace ballast::kernels
