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
  std::size_t sequences = 1;
  std::size_t context = 512;
  std::size_t chunk = 1024;  // positions whose logits are in memory at once

  std::size_t positions() const { return sequences * context; }
};

// The memory of a micro-batch. All layers use the memory of one layer, in turn.
struct Activations {
  using Make = std::function<View(std::size_t count, DType dtype)>;
  Activations(const Config& config, const Batch& batch, const Make& make);

  View inputs, gradient;  // the inputs of layers and of the head; the gradient of one
  View normed, raw_q, raw_k, q, k, v, sums, attended, middle, second_normed, gate, up, activated;
  View narrow_gradient, attended_gradient, q_gradient, k_gradient, v_gradient, raw_q_gradient, raw_k_gradient;
  View wide_gradient, up_gradient;
  View head_normed, logits, logits_gradient, head_gradient, losses;  // of a chunk; losses: of all positions
  View angles;
  View tokens;  // three integers for each position
};

Trace trace_of(const Config& config);  // the uses of a micro-step

std::size_t activation_bytes(const Config& config, const Batch& batch);

class Llama {
 public:
  // `maths` outlives this object.
  Llama(const Config& config, const Batch& batch, Maths& maths);

  // Runs a micro-step on sequences of context + 1 tokens, one after the other. Returns the mean loss.
  double run(Training& training, std::span<const std::uint32_t> text);

  const Model& model() const { return architecture_.model; }

 private:
  void take_in(std::span<const std::uint32_t> text);
  void forward(const Layer& layer, const Lease& lease, const ConstView& input, const View& output);
  void backward(const Layer& layer, const Lease& lease, const ConstView& input);
  void recompute(const Layer& layer, const Lease& lease, const ConstView& input);
  void project(const Lease& lease, TensorId weight, TensorId bias, const View& to);
  void attention_backward(const Layer& layer, const Lease& lease);
  void mlp_backward(const Layer& layer, const Lease& lease);
  void head(const Lease& lease);
  double loss();

  // y = x weight^T, or += that.
  void linear(const ConstView& weight, const ConstMatrix& x, const View& y, bool add = false);
  void linear_backward(const Lease& lease, TensorId weight, const ConstMatrix& x, const View& gradient,
                       const View& x_gradient, bool add = false);
  View input_of(std::size_t layer) const;  // or of the head

  Config config_;
  Batch batch_;
  Maths& maths_;
  Architecture architecture_;
  AttentionShape attention_;
  std::vector<std::shared_ptr<std::byte>> memory_{};
  Activations at_;
  Tokens tokens_{};
};

}  // namespace ballast::llama
