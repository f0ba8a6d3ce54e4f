// Trains a Llama with Ballast: leases of units, forward and backward. It keeps the inputs of layers only, computes each layer again
// in the backward pass, and makes the logits of a chunk of positions at a time.
#pragma once

#include <ballast/training.h>

#include <functional>
#include <span>
#include <vector>

#include "examples/llama/maths.h"
#include "examples/llama/model.h"

namespace ballast::llama {

struct Batch {
  std::size_t sequences = 1;  // of a micro-batch
  std::size_t context = 512;
  std::size_t chunk = 1024;  // positions whose logits are in memory at once
  // Micro-batches that go through a layer one after the other, before the next layer: those of Schedule::layer_major, else 1.
  std::size_t together = 1;
  bool borders_on_host = false;  // keeps the inputs of layers in host memory, on GPUs

  std::size_t positions() const { return sequences * context; }  // of a micro-batch
};

// What a layer computes, and its gradient in the backward pass. Gradients that are needed one after the other share memory.
struct Value {
  View data{};
  View gradient{};
};

// The memory of activations. All layers and micro-batches use the memory of one layer, in turn.
struct Activations {
  using Make = std::function<View(std::size_t count, DType dtype, bool on_host)>;
  Activations(const Config& config, const Batch& batch, const Make& make);

  View inputs, gradients;  // of all micro-batches: the inputs of layers and of the head, and the gradients of one
  Value input, normed, raw_q, raw_k, q, k, v, attended, middle, second_normed, gate, up, activated, output;
  Value head_normed, logits;  // of a chunk
  View sums, angles;
  View ones;            // one for each position: a product with it adds a bias to all rows, or sums them
  View losses, tokens;  // of all micro-batches; tokens: three integers for each position
};

Trace trace_of(const Config& config);  // the uses of a micro-step

std::size_t activation_bytes(const Config& config, const Batch& batch);

class Llama {
 public:
  // `maths` outlives this object.
  Llama(const Config& config, const Batch& batch, Maths& maths);

  // Runs a micro-step, or all that go through layers together, on sequences of context + 1 tokens, one after the other. Returns the
  // sum of the micro-batches' mean losses.
  double run(Training& training, std::span<const std::uint32_t> text);

  const Model& model() const { return architecture_.model; }

 private:
  void take_in(std::span<const std::uint32_t> text);
  void compute(const Layer& layer, const Lease& lease);
  void forward(const Layer& layer, const Lease& lease);
  void backward(const Layer& layer, const Lease& lease);
  void head(const Lease& lease, std::size_t micro_batch);
  double loss();

  void norm(const Lease& lease, TensorId weight, const Value& x, const Value& y);
  void norm_backward(const Lease& lease, TensorId weight, const Value& x, const Value& y, bool add = false);
  // y = x weight^T + bias, or += that. Backward adds to the gradient of x likewise.
  void multiply(const Lease& lease, const Linear& linear, const Value& x, const Value& y, bool add = false);
  void multiply_backward(const Lease& lease, const Linear& linear, const Value& x, const Value& y, bool add = false);

  // The part of a view of all micro-batches; of `inputs`: of a layer, or of the head.
  View of(const View& all, std::size_t micro_batch) const;
  View input_of(std::size_t layer, std::size_t micro_batch) const;
  template <class Body>
  void each_micro_batch(const Body& body) const;

  Config config_;
  Batch batch_;
  Maths& maths_;
  Architecture architecture_;
  std::vector<std::shared_ptr<std::byte>> memory_{};
  Activations at_;
  Attention attention_;
  std::vector<Tokens> tokens_{};  // of each micro-batch
};

}  // namespace ballast::llama
