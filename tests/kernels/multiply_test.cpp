// Tests that a product of matrices has the bits of its definition: chains of fused multiply-adds in a given order, in which
// subnormal numbers are zeros.
#include "kernels/multiply.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu.h"
#include "tests/sanitizer.h"

namespace ballast::kernels {
namespace {

using Halves = std::vector<std::uint16_t>;

Halves random_halves(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  Halves halves(count);
  for (auto& half : halves) {
    half = static_cast<std::uint16_t>(to_bf16(static_cast<float>(random()) * 0x1p-31f - 1.0f));
  }
  return halves;
}

struct Dimensions {
  std::size_t rows, inner, columns, count;
};

// The memory of a product, with a guard behind the result.
struct ProductCase {
  Dimensions sizes;
  bool left_transposed = false;
  bool right_transposed = false;
  Halves left = random_halves(sizes.count * sizes.rows * sizes.inner, 1);
  Halves right = random_halves(sizes.count * sizes.inner * sizes.columns, 2);
  Halves added = random_halves(sizes.count * sizes.rows * sizes.columns, 3);
  Halves to = Halves(added.size() + 1, 0x1234);

  Product product() {
    const auto factor = [](const Halves& halves, bool transposed, std::size_t rows, std::size_t columns) {
      return transposed ? Factor{halves.data(), 1, rows} : Factor{halves.data(), columns, 1};
    };
    return {.rows = sizes.rows,
            .inner = sizes.inner,
            .columns = sizes.columns,
            .count = sizes.count,
            .left = factor(left, left_transposed, sizes.rows, sizes.inner),
            .right = factor(right, right_transposed, sizes.inner, sizes.columns),
            .to = to.data(),
            .added = added.data(),
            .alpha = 0.7f,
            .beta = -1.3f};
  }
};

float value_at(const Factor& factor, std::size_t row, std::size_t column) {
  return from_bf16(std::uint32_t{factor.data[row * factor.row_step + column * factor.column_step]});
}

float no_subnormal(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

// The result is subnormal if it is one when it is rounded to 24 bits. Where that matters, its double is exact.
float next_sum(float a, float b, float sum) {
  const double exact = std::fma(static_cast<double>(a), static_cast<double>(b), static_cast<double>(sum));
  const bool subnormal = std::fabs(exact) < 0x1p-126 - 0x1p-151;
  return subnormal ? static_cast<float>(std::copysign(0.0, exact)) : std::fma(a, b, sum);
}

struct Element {
  std::size_t row, column, inner;
};

float sum_by_definition(const Factor& left, const Factor& right, const Element& of) {
  float sum = 0.0f;
  const auto add = [&](std::size_t k) {
    const bool exists = k < of.inner;
    const float one = exists ? value_at(left, of.row, k) : 0.0f, other = exists ? value_at(right, k, of.column) : 0.0f;
    sum = next_sum(no_subnormal(one), no_subnormal(other), sum);
  };
  for (std::size_t k = 0; k < of.inner; k += 2) {
    add(k + 1);
    add(k);
  }
  return sum;
}

Halves by_definition(const Product& product) {
  Halves expected;
  for (std::size_t n = 0; n < product.count; ++n) {
    const Factor left{product.left.data + n * product.rows * product.inner, product.left.row_step,
                      product.left.column_step};
    const Factor right{product.right.data + n * product.inner * product.columns, product.right.row_step,
                       product.right.column_step};
    for (std::size_t row = 0; row < product.rows; ++row) {
      for (std::size_t column = 0; column < product.columns; ++column) {
        float sum = sum_by_definition(left, right, {row, column, product.inner});
        sum *= product.alpha;
        if (product.beta != 0.0f) {
          sum = std::fma(product.beta, from_bf16(std::uint32_t{product.added[expected.size()]}), sum);
        }
        expected.push_back(static_cast<std::uint16_t>(to_bf16(sum)));
      }
    }
  }
  return expected;
}

void check_on(const Cpu& cpu, const Product& product, Halves& to, const Halves& expected) {
  const auto threads = static_cast<std::size_t>(cpu.threads.count());
  std::vector<BlockMemory> memory(threads);
  std::fill(to.begin(), to.end(), std::uint16_t{0x1234});
  multiply(cpu, product, memory);
  CHECK(to.back() == 0x1234);
  if (!std::equal(expected.begin(), expected.end(), to.begin())) {
    FAIL("other bits on " << threads << " threads: " << product.rows << " x " << product.inner << " x "
                          << product.columns << ", " << product.count << " matrices");
  }
}

void check_everywhere(const Product& product, Halves& to) {
  const Halves expected = by_definition(product);
  for (const simd::Isa isa : simd::usable_isas()) {
    for (const MultiplyBlock block : multiply_blocks(isa)) {
      Walks walks = walks_for(isa);
      walks.multiply_block = block;
      for (const int threads : {1, 3}) {
        INFO(simd::name(isa) << ", "
                             << (block == multiply_blocks(isa).front() ? "the best" : "without bf16 instructions"));
        check_on({walks, Threads(threads)}, product, to, expected);
      }
    }
  }
}

}  // namespace

TEST_CASE("products of matrices have the bits of their definition") {
  const std::vector<Dimensions> all{{1, 1, 1, 1},     {0, 3, 2, 1},     {2, 0, 3, 1},     {5, 7, 3, 2},
                                    {12, 32, 31, 3},  {97, 20, 33, 2},  {13, 300, 40, 1}, {200, 9, 5, 1},
                                    {3, 257, 210, 1}, {193, 40, 193, 1}};
  for (std::size_t i = 0; i < all.size(); i += testing::every(3)) {
    for (const bool left_transposed : {false, true}) {
      for (const bool right_transposed : {false, true}) {
        ProductCase with{.sizes = all[i], .left_transposed = left_transposed, .right_transposed = right_transposed};
        check_everywhere(with.product(), with.to);
      }
    }
  }
}

TEST_CASE("subnormal numbers are zeros in the sums of a product") {
  const std::vector<int> exponents{-126, -66, -65, -64, -63};
  ProductCase with{.sizes = {23, 71, 41, 1}};
  std::mt19937 random(4);
  for (Halves* halves : {&with.left, &with.right}) {
    for (auto& half : *halves) {
      const float value = std::ldexp(from_bf16(std::uint32_t{half}), exponents[random() % exponents.size()]);
      half = static_cast<std::uint16_t>(simd::bits(value) >> 16);
    }
  }
  Product product = with.product();
  product.beta = 0.0f;
  product.alpha = 0x1p60f;  // bf16 then shows the last bits of small sums
  check_everywhere(product, with.to);
}

// ARM decides before rounding whether a result is subnormal, x86 after.
TEST_CASE("sums are zeros if they are subnormal after rounding") {
  ProductCase with{.sizes = {12, 2, 32, 1}};
  for (std::size_t column = 0; column < with.sizes.columns; ++column) {
    const float added = std::ldexp(-1.0f - static_cast<float>(column % 8) / 8.0f, -90 - static_cast<int>(column / 8));
    with.right[with.sizes.columns + column] = static_cast<std::uint16_t>(simd::bits(0x1p-63f) >> 16);
    with.right[column] = static_cast<std::uint16_t>(simd::bits(added) >> 16);
  }
  for (std::size_t row = 0; row < with.sizes.rows; ++row) {
    const float sign = row % 2 == 0 ? 1.0f : -1.0f;
    with.left[2 * row + 1] = static_cast<std::uint16_t>(simd::bits(sign * 0x1p-63f) >> 16);
    with.left[2 * row] =
        static_cast<std::uint16_t>(simd::bits(std::ldexp(sign, -57 - static_cast<int>(row / 2))) >> 16);
  }
  Product product = with.product();
  product.beta = 0.0f;
  product.alpha = 0x1p100f;
  check_everywhere(product, with.to);
  CHECK(std::count(with.to.begin(), with.to.end(), std::uint16_t{0}) > 0);
  CHECK(std::count(with.to.begin(), with.to.end(), std::uint16_t{0}) < 192);
}

TEST_CASE("a symmetric product has the bits of both of its halves") {
  for (const std::size_t side : {std::size_t{1}, std::size_t{31}, std::size_t{100}, std::size_t{210}}) {
    ProductCase with{.sizes = {side, 70, side, 2}};
    Product product = with.product();
    product.right = transposed(product.left);
    product.beta = 0.0f;
    product.symmetric = true;
    check_everywhere(product, with.to);
  }
}

}  // namespace ballast::kernels
