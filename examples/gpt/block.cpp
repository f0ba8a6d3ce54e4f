#include "examples/gpt/block.h"

#include "examples/gpt/layers.h"

namespace ballast::gpt {

using namespace block;

namespace {

struct Part {
  View BlockMemory::*view;
  std::size_t widths;
};
constexpr Part parts[] = {{&BlockMemory::normed, 1},        {&BlockMemory::qkv, 3},
                          {&BlockMemory::attended, 1},      {&BlockMemory::middle, 1},
                          {&BlockMemory::second_normed, 1}, {&BlockMemory::widened, 4},
                          {&BlockMemory::activated, 4},     {&BlockMemory::narrow_gradient, 1},
                          {&BlockMemory::wide_gradient, 4}};

}  // namespace

std::size_t BlockMemory::bytes(const Shape& shape, std::size_t batch) {
  std::size_t widths = 0;
  for (const Part& part : parts) {
    widths += part.widths;
  }
  return widths * batch * shape.context * shape.width * byte_size(shape.dtype);
}

BlockMemory::BlockMemory(const Shape& shape, std::size_t batch, const Maths& maths, MemoryAccounts& accounts)
    : buffer_(allocate(accounts, {.kind = maths.memory(),
                                  .bytes = bytes(shape, batch),
                                  .owner = "activations of a block",
                                  .gpu = maths.gpu()})) {
  const std::size_t elements = batch * shape.context * shape.width;
  const View all = buffer_.view(shape.dtype);
  std::size_t first = 0;
  for (const Part& part : parts) {
    this->*part.view = all.part(first, part.widths * elements);
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
