#include <algorithm>
#include <atomic>

#include "kernels/cpu.h"

namespace ballast::kernels {
namespace {

constexpr std::size_t tasks_of_a_thread = 4;  // at least, to balance the threads

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

}  // namespace ballast::kernels
