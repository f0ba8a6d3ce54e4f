// Trains a GPT with Ballast: an example of a trainer. The only activations that it keeps are the inputs of the blocks.
#pragma once

#include <ballast/training.h>

#include <span>
#include <vector>

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

// A transformer block, forward and backward: y = x + projection(attention(norm(x))), then y + narrow(gelu(widen(norm(y)))).
class Block {
 public:
  Block(const Shape& shape, std::size_t batch, Maths& maths, BlockMemory& memory)
      : attention_{batch, shape.context, shape.heads, shape.width / shape.heads}, maths_(maths), memory_(memory) {}

  void forward(const Lease& lease, const ConstView& input, const View& output) const;

  // Computes the block again from its input. `gradient` is that of the output, and becomes that of the input.
  void backward(const Lease& lease, const ConstView& input, const View& gradient) const;

 private:
  void recompute(const Lease& lease, const ConstView& input) const;  // recomputes up to the input of the last product

  AttentionShape attention_;
  Maths& maths_;
  BlockMemory& memory_;
};

class Gpt {
 public:
  // `maths` and `accounts` outlive this object, which books its activations in these accounts.
  Gpt(const Shape& shape, std::size_t batch, Maths& maths, MemoryAccounts& accounts);
  static std::size_t activation_bytes(const Shape& shape, std::size_t batch);

  // Runs a micro-step on `batch` sequences of context + 1 bytes, one after the other. Returns the mean loss.
  double run(Training& training, std::span<const std::uint8_t> text);

  // Runs the forward pass only. No other micro-step can begin after it.
  double evaluate(Training& training, std::span<const std::uint8_t> text);

 private:
  void take_in(std::span<const std::uint8_t> text);
  void forward(Training& training);
  void head_forward(const Lease& lease);
  void backward(Training& training);
  void head_backward(const Lease& lease);
  double loss();
  View input_of(std::size_t layer) const;  // the input of a block, or of the head

  Shape shape_;
  std::size_t positions_;
  Maths& maths_;
  BlockMemory block_memory_;
  Block block_;
  std::vector<Buffer> buffers_{};
  View inputs_{}, gradient_{}, logits_{}, logits_gradient_{}, losses_{}, bytes_{}, targets_{};
};

}  // namespace ballast::gpt
