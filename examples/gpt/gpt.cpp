#include "examples/gpt/gpt.h"

#include <ballast/lease.h>

#include <fmt/format.h>

#include <array>
#include <numeric>
#include <vector>

namespace ballast::gpt {

namespace {

// The layers with parameters, over a lease. Each has the index of its weight; its bias has the next index.
struct Layer {
  Maths& maths;
  const Lease& lease;
  std::size_t weight;

  ConstView weights() const { return lease[weight]; }
  ConstView bias() const { return lease[weight + 1]; }
};

// y = x weights^T + bias, or += that.
struct Linear : Layer {
  void forward(const ConstView& x, const View& y, bool add = false) const;
  void backward(const ConstView& x, const ConstView& gradient, const View& x_gradient) const;
};

struct Norm : Layer {
  void forward(const ConstView& x, const View& y) const;
  void backward(const ConstView& x, const ConstView& gradient, const View& x_gradient) const;  // adds to x's
};

void Linear::forward(const ConstView& x, const View& y, bool add) const {
  const std::size_t outputs = bias().count(), inputs = weights().count() / outputs;
  maths.multiply({.a = matrix(x, inputs),
                  .b = transposed(weights(), inputs),
                  .to = matrix(y, outputs),
                  .bias = bias(),
                  .add = add});
}

void Linear::backward(const ConstView& x, const ConstView& gradient, const View& x_gradient) const {
  const std::size_t outputs = bias().count(), inputs = weights().count() / outputs;
  maths.multiply({.a = transposed(gradient, outputs),
                  .b = matrix(x, inputs),
                  .to = matrix(lease.gradient(weight), inputs),
                  .add = true});
  maths.add_rows(matrix(gradient, outputs), lease.gradient(weight + 1));
  maths.multiply({.a = matrix(gradient, outputs), .b = matrix(weights(), inputs), .to = matrix(x_gradient, inputs)});
}

void Norm::forward(const ConstView& x, const View& y) const { maths.layer_norm(x, {weights(), bias()}, y); }

void Norm::backward(const ConstView& x, const ConstView& gradient, const View& x_gradient) const {
  maths.layer_norm_backward(x, {weights(), bias()}, gradient,
                            {lease.gradient(weight), lease.gradient(weight + 1), x_gradient});
}

struct BlockPart {
  View BlockMemory::*view;
  std::size_t widths;
};
constexpr BlockPart block_parts[] = {{&BlockMemory::normed, 1},        {&BlockMemory::qkv, 3},
                                     {&BlockMemory::attended, 1},      {&BlockMemory::middle, 1},
                                     {&BlockMemory::second_normed, 1}, {&BlockMemory::widened, 4},
                                     {&BlockMemory::activated, 4},     {&BlockMemory::narrow_gradient, 1},
                                     {&BlockMemory::wide_gradient, 4}};

struct Part {
  std::size_t count;
  DType dtype;
  const char* owner;
};

// Returns the parts in the order of the views in the constructor.
std::array<Part, 7> parts_of(const Shape& shape, std::size_t positions) {
  const std::size_t elements = positions * shape.width, logit_count = positions * Shape::vocabulary;
  return {{{(shape.layers + 1) * elements, shape.dtype, "inputs of blocks"},
           {elements, shape.dtype, "gradient of a block's input"},
           {logit_count, DType::fp32, "logits"},
           {logit_count, shape.dtype, "gradient of logits"},
           {positions, DType::fp32, "losses"},
           {positions, DType::u8, "text"},
           {positions, DType::u8, "targets"}}};
}

}  // namespace

std::size_t BlockMemory::bytes(const Shape& shape, std::size_t batch) {
  std::size_t widths = 0;
  for (const BlockPart& part : block_parts) {
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
  for (const BlockPart& part : block_parts) {
    this->*part.view = all.part(first, part.widths * elements);
    first += part.widths * elements;
  }
}

void Block::recompute(const Lease& lease, const ConstView& input) const {
  using namespace block;
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
  using namespace block;
  recompute(lease, input);
  maths_.copy(memory_.middle, output);
  Linear{maths_, lease, narrow_weight}.forward(memory_.activated, output, true);
}

void Block::backward(const Lease& lease, const ConstView& input, const View& gradient) const {
  using namespace block;
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

std::size_t Gpt::activation_bytes(const Shape& shape, std::size_t batch) {
  std::size_t all = BlockMemory::bytes(shape, batch);
  for (const Part& part : parts_of(shape, batch * shape.context)) {
    all += part.count * byte_size(part.dtype);
  }
  return all;
}

Gpt::Gpt(const Shape& shape, std::size_t batch, Maths& maths, MemoryAccounts& accounts)
    : shape_(shape),
      positions_(batch * shape.context),
      maths_(maths),
      block_memory_(shape, batch, maths, accounts),
      block_(shape, batch, maths, block_memory_) {
  const std::array<View*, 7> views{&inputs_, &gradient_, &logits_, &logits_gradient_, &losses_, &bytes_, &targets_};
  const std::array<Part, 7> parts = parts_of(shape, positions_);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto& [count, dtype, owner] = parts[i];
    buffers_.push_back(allocate(
        accounts, {.kind = maths.memory(), .bytes = count * byte_size(dtype), .owner = owner, .gpu = maths.gpu()}));
    *views[i] = buffers_.back().view(dtype);
  }
}

double Gpt::run(Training& training, std::span<const std::uint8_t> text) {
  take_in(text);
  forward(training);
  backward(training);
  return loss();
}

double Gpt::evaluate(Training& training, std::span<const std::uint8_t> text) {
  take_in(text);
  forward(training);
  return loss();
}

void Gpt::take_in(std::span<const std::uint8_t> text) {
  const std::size_t sequence = shape_.context + 1;
  require(text.size() / sequence * shape_.context == positions_, Code::wrong_size, [&] {
    return Problem{.what = fmt::format("cannot train on {} bytes of text", text.size()),
                   .needed = fmt::format("sequences of {} bytes for {} positions", sequence, positions_)};
  });
  std::vector<std::uint8_t> bytes, targets;
  for (std::size_t first = 0; first < text.size(); first += sequence) {
    const auto all = text.subspan(first, sequence);
    bytes.insert(bytes.end(), all.begin(), all.end() - 1);
    targets.insert(targets.end(), all.begin() + 1, all.end());
  }
  maths_.upload(std::as_bytes(std::span(bytes)), bytes_);
  maths_.upload(std::as_bytes(std::span(targets)), targets_);
}

void Gpt::forward(Training& training) {
  {
    const Lease lease = training.forward(0);
    maths_.embed(bytes_, {lease[embedding::tokens], lease[embedding::positions]}, input_of(0));
  }
  for (std::size_t layer = 0; layer < shape_.layers; ++layer) {
    const Lease lease = training.forward(shape_.blocks_begin() + layer);
    block_.forward(lease, input_of(layer), input_of(layer + 1));
  }
  head_forward(training.forward(shape_.head_unit()));
}

void Gpt::backward(Training& training) {
  head_backward(training.backward(shape_.head_unit()));
  for (std::size_t layer = shape_.layers; layer-- > 0;) {
    const Lease lease = training.backward(shape_.blocks_begin() + layer);
    block_.backward(lease, input_of(layer), gradient_);
  }
  const Lease lease = training.backward(0);
  maths_.embed_backward(bytes_, gradient_, {lease.gradient(embedding::tokens), lease.gradient(embedding::positions)});
}

// Leaves the gradient of the logits and the input of the last product for the backward pass, which begins with the
// head.
void Gpt::head_forward(const Lease& lease) {
  Norm{maths_, lease, head::norm_weight}.forward(input_of(shape_.layers), block_memory_.normed);
  maths_.multiply({.a = matrix(ConstView(block_memory_.normed), shape_.width),
                   .b = transposed(lease[head_weight(shape_)], shape_.width),
                   .to = matrix(logits_, Shape::vocabulary)});
  maths_.cross_entropy(logits_, {targets_, losses_, logits_gradient_});
}

void Gpt::head_backward(const Lease& lease) {
  const TensorId weight = head_weight(shape_);
  maths_.multiply({.a = transposed(ConstView(logits_gradient_), Shape::vocabulary),
                   .b = matrix(ConstView(block_memory_.normed), shape_.width),
                   .to = matrix(lease.gradient(weight), shape_.width),
                   .add = true});
  maths_.multiply({.a = matrix(ConstView(logits_gradient_), Shape::vocabulary),
                   .b = matrix(lease[weight], shape_.width),
                   .to = matrix(block_memory_.narrow_gradient, shape_.width)});
  maths_.clear(gradient_);
  Norm{maths_, lease, head::norm_weight}.backward(input_of(shape_.layers), block_memory_.narrow_gradient, gradient_);
}

double Gpt::loss() {
  std::vector<float> losses(positions_);
  maths_.download(losses_, std::as_writable_bytes(std::span(losses)));
  return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(positions_);
}

View Gpt::input_of(std::size_t layer) const {
  const std::size_t elements = positions_ * shape_.width;
  return inputs_.part(layer * elements, elements);
}

}  // namespace ballast::gpt
