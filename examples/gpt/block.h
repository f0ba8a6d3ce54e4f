// A transformer block, forward and backward: y = x + projection(attention(norm(x))), then y +
// narrow(gelu(widen(norm(y)))).
#pragma once

#include "examples/gpt/maths.h"
#include "examples/gpt/model.h"

namespace ballast::gpt {

// Memory for the activations of a batch inside one block. All blocks use the same memory, in turn.
class BlockMemory {
 public:
  BlockMemory(const Shape& shape, std::size_t batch, const Maths& maths, MemoryAccounts& accounts);
  static std::size_t bytes(const Shape& shape, std::size_t batch);

  View normed{}, qkv{}, attended{}, middle{}, second_normed{}, widened{}, activated{};
  View narrow_gradient{}, wide_gradient{};

 private:
  Buffer buffer_;
};

class Block {
 public:
  Block(const Shape& shape, std::size_t batch, Maths& maths, BlockMemory& memory)
      : attention_{batch, shape.context, shape.heads, shape.width / shape.heads}, maths_(maths), memory_(memory) {}

  void forward(const Lease& lease, const ConstView& input, const View& output) const;

  // Computes the block again from its input. `gradient` is that of the output, and becomes that of the input.
  void backward(const Lease& lease, const ConstView& input, const View& gradient) const;

 private:
  void recompute(const Lease& lease, const ConstView& input) const;  // up to the input of the last product

  AttentionShape attention_;
  Maths& maths_;
  BlockMemory& memory_;
};

}  // namespace ballast::gpt
