#include "examples/gpt/gpt.h"

#include <fmt/format.h>

#include <array>
#include <numeric>
#include <vector>

#include "examples/gpt/layers.h"

namespace ballast::gpt {

namespace {

struct Part {
  std::size_t count;
  DType dtype;
  const char* owner;
};

// Returns the parts in the order of the views in the constructor.
std::array<Part, 7> parts_of(const Shape& shape, std::size_t positions) {
  const std::size_t elements = positions * shape.width, of_logits = positions * Shape::vocabulary;
  return {{{(shape.layers + 1) * elements, shape.dtype, "inputs of blocks"},
           {elements, shape.dtype, "gradient of a block's input"},
           {of_logits, DType::fp32, "logits"},
           {of_logits, shape.dtype, "gradient of logits"},
           {positions, DType::fp32, "losses"},
           {positions, DType::u8, "text"},
           {positions, DType::u8, "targets"}}};
}

}  // namespace

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
    maths_.embed(bytes_, {lease.tensor(embedding::tokens), lease.tensor(embedding::positions)}, input_of(0));
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
  const ConstView weight = shape_.tied ? lease.tied(0) : lease.tensor(head::weight);
  Norm{maths_, lease, head::norm_weight}.forward(input_of(shape_.layers), block_memory_.normed);
  maths_.multiply({.a = matrix(ConstView(block_memory_.normed), shape_.width),
                   .b = transposed(weight, shape_.width),
                   .to = matrix(logits_, Shape::vocabulary)});
  maths_.cross_entropy(logits_, {targets_, losses_, logits_gradient_});
}

void Gpt::head_backward(const Lease& lease) {
  const ConstView weight = shape_.tied ? lease.tied(0) : lease.tensor(head::weight);
  const View weight_gradient = shape_.tied ? lease.tied_gradient(0) : lease.gradient(head::weight);
  maths_.multiply({.a = transposed(ConstView(logits_gradient_), Shape::vocabulary),
                   .b = matrix(ConstView(block_memory_.normed), shape_.width),
                   .to = matrix(weight_gradient, shape_.width),
                   .add = true});
  maths_.multiply({.a = matrix(ConstView(logits_gradient_), Shape::vocabulary),
                   .b = matrix(weight, shape_.width),
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
