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

// The memory of activations. All layers and micro-batches use the memory of one layer, in turn.
struct Activations {
  using Make = std::function<View(std::size_t count, DType dtype, bool on_host)>;
  Activations(const Config& config, const Batch& batch, const Make& make);

  View inputs, gradients;  // of all micro-batches: the inputs of layers and of the head, and the gradients of one
  View input, output, gradient;
  View normed, raw_q, raw_k, q, k, v, sums, attended, middle, second_normed, gate, up, activated;
  View narrow_gradient, attended_gradient, q_gradient, k_gradient, v_gradient, raw_q_gradient, raw_k_gradient;
  View wide_gradient, up_gradient;
  View head_normed, logits, logits_gradient, head_gradient;  // of a chunk
  View angles;
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
  void forward(const Layer& layer, const Lease& lease);
  void backward(const Layer& layer, const Lease& lease);
  void recompute(const Layer& layer, const Lease& lease);
  void project(const Lease& lease, TensorId weight, TensorId bias, const View& to);
  void attention_backward(const Layer& layer, const Lease& lease);
  void mlp_backward(const Layer& layer, const Lease& lease);
  void head(const Lease& lease, std::size_t micro_batch);
  double loss();

  // y = x weight^T, or += that.
  void linear(const ConstView& weight, const ConstMatrix& x, const View& y, bool add = false);
  void linear_backward(const Lease& lease, TensorId weight, const ConstMatrix& x, const View& gradient,
                       const View& x_gradient, bool add = false);
  // The part of a view of all micro-batches; of `inputs`: of a layer, or of the head.
  View of(const View& all, std::size_t micro_batch) const;
  View input_of(std::size_t layer, std::size_t micro_batch) const;
  template <class Body>
  void each_micro_batch(const Body& body) const;

  Config config_;
  Batch batch_;
  Maths& maths_;
  Architecture architecture_;
  AttentionShape attention_;
  std::vector<std::shared_ptr<std::byte>> memory_{};
  Activations at_;
  std::vector<Tokens> tokens_{};  // of each micro-batch
};

}  // namespace ballast::llama
