// The products of matrices of a CPU, divided among its threads, and orthogonalizations by them.
#include <algorithm>
#include <atomic>
#include <memory>

#include "kernels/cpu.h"
#include "kernels/orthogonalize.h"
#include "kernels/pieces.h"

namespace ballast::kernels {

namespace {

constexpr std::size_t tasks_of_a_thread = 4;  // the fewest tasks, to balance the threads

// The blocks of a product, in the order in which threads take them.
struct Blocks {
  std::size_t size;
  std::size_t down;
  std::size_t across;
  std::size_t all;

  Blocks(const Product& product, std::size_t block)
      : size(block),
        down((product.rows + block - 1) / block),
        across((product.columns + block - 1) / block),
        all(product.count * down * across) {}
};

Blocks blocks_for(const Product& product, std::size_t threads) {
  const Blocks large(product, block_size);
  return large.all >= tasks_of_a_thread * threads ? large : Blocks(product, small_block_size);
}

// The nth matrix of a product of many.
Product nth(const Product& product, std::size_t n) {
  Product one = product;
  one.left.data += n * product.rows * product.inner;
  one.right.data += n * product.inner * product.columns;
  one.to += n * product.rows * product.columns;
  if (product.added != nullptr) one.added += n * product.rows * product.columns;
  return one;
}

}  // namespace

void multiply(const Cpu& cpu, const Product& product, std::span<BlockMemory> memory) {
  const Blocks blocks = blocks_for(product, memory.size());
  std::atomic<std::size_t> next = 0;
  cpu.threads.each(std::min(memory.size(), blocks.all), [&](std::size_t worker) {
    for (std::size_t task = next++; task < blocks.all; task = next++) {
      const std::size_t row = task / blocks.across % blocks.down;
      const std::size_t column = task % blocks.across;
      if (product.symmetric && column < row) continue;
      cpu.walks.multiply_block(nth(product, task / (blocks.down * blocks.across)),
                               {row * blocks.size, column * blocks.size, blocks.size}, memory[worker]);
    }
  });
}

namespace {

class CpuOrthogonalizer : public Orthogonalizer {
 public:
  explicit CpuOrthogonalizer(const CpuOptions& options)
      : cpu_(cpu_of(options)),
        blocks_(std::make_unique_for_overwrite<BlockMemory[]>(static_cast<std::size_t>(cpu_.threads.count()))) {}

  std::size_t workspace_bytes(const MatrixShape& shape) const override {
    return kernels::workspace_bytes(shape, false);
  }

 private:
  void normalize(const std::uint16_t* from, const MatrixShape& shape, const NormBound& bound, ExactSum* squares,
                 std::uint16_t* to) override {
    const std::size_t elements = shape.rows * shape.columns;
    for (std::size_t i = 0; i < shape.count; ++i, from += elements, to += elements) {
      squares[i] = {};
      sum_of_squares(cpu_, {reinterpret_cast<const std::byte*>(from), elements, DType::bf16}, &squares[i]);
      const float by = divisor(squares[i], bound);
      each_piece(cpu_.threads, elements,
                 [&](std::size_t first, std::size_t count) { cpu_.walks.divide(from + first, by, to + first, count); });
    }
  }

  void multiply(const Product& product) override {
    kernels::multiply(cpu_, product, {blocks_.get(), static_cast<std::size_t>(cpu_.threads.count())});
  }

  Cpu cpu_;
  std::unique_ptr<BlockMemory[]> blocks_;  // one for each thread; becomes resident when it is used
};

}  // namespace

std::unique_ptr<Orthogonalizer> cpu_orthogonalizer(CpuOptions options) {
  return std::make_unique<CpuOrthogonalizer>(options);
}

}  // namespace ballast::kernels
