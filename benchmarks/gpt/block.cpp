#include "benchmarks/gpt/block.h"

#include "benchmarks/gpt/layers.h"

namespace ballast::gpt {

using namespace block;

BlockMemory::BlockMemory(const Shape& shape, std::size_t batch, const Maths& maths, MemoryAccounts& accounts) {
  struct Part {
    View& view;
    std::size_t widths;
  };
  const Part parts[] = {{normed, 1},  {qkv, 3},       {attended, 1},        {middle, 1},       {second_normed, 1},
                        {widened, 4}, {activated, 4}, {narrow_gradient, 1}, {wide_gradient, 4}};
  std::size_t widths = 0;
  for (const Part& part : parts) {
    widths += part.widths;
  }
  const std::size_t elements = batch * shape.context * shape.width;
  buffer_ = allocate(
      accounts,
      {.kind = maths.memory(), .bytes = widths * elements * byte_size(shape.dtype), .owner = "activations of a block"});
  const View all = buffer_.view(shape.dtype);
  std::size_t first = 0;
  for (const Part& part : parts) {
    part.view = all.part(first, part.widths * elements);
    first += part.widths * elements;
  }
}

void Block::recompute(const Lease& lease, const ConstView& input) const {
  const BlockMemory& m = memory_;
  Norm{maths_, lease, norm_weight}.forward(input, m.normed);
  Linear{maths_, lease, qkv_weight}.forward(m.normed, m.qkv);
  maths_.attention(attention_, m.qkv, m.attended);
  maths_.copy(input, m.middle);
  Linear{maths_, lease, projection_weight}.forward(m.attended, m.middle, true);
  Norm{maths_, lease, second_norm_weight}.forward(m.middle, m.second_normed);
  Linear{maths_, lease, widen_weight}.forward(m.second_normed, m.widened);
  maths_.gelu(m.widened, m.activated);
}

void Block::forward(const Lease& lease, const ConstView& input, const View& output) const {
  recompute(lease, input);
  maths_.copy(memory_.middle, output);
  Linear{maths_, lease, narrow_weight}.forward(memory_.activated, output, true);
}

void Block::backward(const Lease& lease, const ConstView& input, const View& gradient) const {
  const BlockMemory& m = memory_;
  recompute(lease, input);
  Linear{maths_, lease, narrow_weight}.backward(m.activated, gradient, m.wide_gradient);
  maths_.gelu_backward(m.widened, m.wide_gradient);
  Linear{maths_, lease, widen_weight}.backward(m.second_normed, m.wide_gradient, m.narrow_gradient);
  Norm{maths_, lease, second_norm_weight}.backward(m.middle, m.narrow_gradient, gradient);
  const View qkv_gradient = m.wide_gradient.part(0, m.qkv.count());
  Linear{maths_, lease, projection_weight}.backward(m.attended, gradient, m.narrow_gradient);
  maths_.attention_backward(attention_, m.qkv, m.narrow_gradient, qkv_gradient);
  Linear{maths_, lease, qkv_weight}.backward(m.normed, qkv_gradient, m.narrow_gradient);
  Norm{maths_, lease, norm_weight}.backward(input, m.narrow_gradient, gradient);
}

}  // namespace ballast::gpt
