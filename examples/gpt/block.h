// A transformer block, forward and backward: x + projection(attention(norm(x))), and that + narrow(gelu(widen(norm(it)))).
#pragma once

#include "examples/gpt/maths.h"
#include "examples/gpt/model.h"

namespace ballast::gpt {

// Memory for a batch's activations on their way through one block: there is one of it, for all blocks in turn.
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

  // Computes the block anew from its input. `gradient` is that of the output, and becomes that of the input.
  void backward(const Lease& lease, const ConstView& input, const View& gradient) const;

 private:
  void recompute(const Lease& lease, const ConstView& input) const;  // up to what the last product reads

  AttentionShape attention_;
  Maths& maths_;
  BlockMemory& memory_;
};

}  // namespace ballast::gpt
