#include "examples/gpt/matrix_rate.h"

#include <algorithm>
#include <chrono>

namespace ballast::gpt {
namespace {

constexpr double long_enough = 0.2;  // seconds of one size

double fastest_square(Maths& maths, const View& memory, std::size_t edge) {
  const auto square = [&](std::size_t number) { return matrix(memory.part(number * edge * edge, edge * edge), edge); };
  const auto readable = [&](std::size_t number) {
    return matrix(ConstView(memory).part(number * edge * edge, edge * edge), edge);
  };
  const Product product{.a = readable(0), .b = readable(1), .to = square(2)};
  maths.multiply(product);  // the first one warms up
  maths.finish();
  double best = 0;
  for (double total = 0; total < long_enough;) {
    const auto begin = std::chrono::steady_clock::now();
    maths.multiply(product);
    maths.finish();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    best = std::max(best, product.operations() / seconds);
    total += seconds;
  }
  return best;
}

}  // namespace

double measure_matrix_rate(Maths& maths, DType dtype) {
  const std::size_t largest = maths.memory() == MemoryKind::device ? 8192 : 1536;
  const std::size_t elements = 3 * largest * largest;
  MemoryAccounts accounts;
  const Buffer memory = allocate(accounts, {.kind = maths.memory(),
                                            .bytes = elements * byte_size(dtype),
                                            .owner = "matrices to measure",
                                            .gpu = maths.gpu()});
  maths.clear(memory.view(dtype));
  double best = 0;
  for (const std::size_t edge : {largest / 3, largest * 2 / 3, largest}) {
    best = std::max(best, fastest_square(maths, memory.view(dtype), edge / 64 * 64));
  }
  return best;
}

}  // namespace ballast::gpt
