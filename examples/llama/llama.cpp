#include "examples/llama/llama.h"

#include <algorithm>
#include <numeric>

namespace ballast::llama {

Activations::Activations(const Config& c, const Batch& batch, const Make& make) {
  const std::size_t positions = batch.positions(), chunk = std::min(batch.chunk, positions);
  const auto rows = [&](std::size_t width) { return make(positions * width, c.dtype); };
  inputs = rows((c.layers + 1) * c.hidden);
  for (View* const view : {&gradient, &normed, &middle, &second_normed, &narrow_gradient})
    *view = rows(c.hidden);
  for (View* const view : {&raw_q, &attended, &attended_gradient, &q_gradient})
    *view = rows(c.query_width());
  for (View* const view : {&raw_k, &v, &k_gradient, &v_gradient})
    *view = rows(c.kv_width());
  q = c.has_head_norms ? rows(c.query_width()) : raw_q;
  k = c.has_head_norms ? rows(c.kv_width()) : raw_k;
  raw_q_gradient = c.has_head_norms ? rows(c.query_width()) : q_gradient;
  raw_k_gradient = c.has_head_norms ? rows(c.kv_width()) : k_gradient;
  for (View* const view : {&gate, &up, &activated, &wide_gradient, &up_gradient})
    *view = rows(c.intermediate);
  sums = make(positions * c.heads, DType::fp32);
  head_normed = make(chunk * c.hidden, c.dtype);
  head_gradient = make(chunk * c.hidden, c.dtype);
  logits = make(chunk * c.vocabulary, DType::fp32);
  logits_gradient = make(chunk * c.vocabulary, c.dtype);
  losses = make(positions, DType::fp32);
  angles = make(batch.context * c.head_width, DType::fp32);
  tokens = make(3 * positions * sizeof(std::uint32_t), DType::u8);
}

std::size_t activation_bytes(const Config& config, const Batch& batch) {
  std::size_t bytes = 0;
  const Activations counted(config, batch, [&](std::size_t count, DType dtype) {
    bytes += count * byte_size(dtype);
    return View();
  });
  return bytes;
}

Llama::Llama(const Config& config, const Batch& batch, Maths& maths)
    : config_(config),
      batch_(batch),
      maths_(maths),
      architecture_(config),
      attention_{batch.context, config.heads, config.kv_heads, config.head_width},
      at_(config, batch, [this](std::size_t count, DType dtype) {
        memory_.push_back(maths_.allocate(count * byte_size(dtype)));
        return View(memory_.back().get(), count, dtype);
      }) {
  const std::vector<float> angles = rope_angles(config, batch.context);
  maths_.upload(angles.data(), at_.angles.data(), at_.angles.bytes());
}

Trace trace_of(const Config& config) {
  Trace trace;
  const std::size_t head_unit = config.layers + 1;
  for (std::size_t unit = 0; unit < head_unit; ++unit)
    trace.push_back({unit, Phase::forward});
  if (config.tied) trace.push_back({.unit = 0, .phase = Phase::backward, .held = true});  // the head's weight
  for (std::size_t unit = head_unit + 1; unit-- > 0;)
    trace.push_back({unit, Phase::backward});
  return trace;
}

double Llama::run(Training& training, std::span<const std::uint32_t> text) {
  take_in(text);
  maths_.embed(tokens_, training.forward(0)[architecture_.table], input_of(0));
  for (std::size_t i = 0; i < config_.layers; ++i) {
    const Layer& layer = architecture_.layers[i];
    forward(layer, training.forward(layer.unit), input_of(i), input_of(i + 1));
  }
  head(training.backward(config_.layers + 1));
  for (std::size_t i = config_.layers; i-- > 0;) {
    const Layer& layer = architecture_.layers[i];
    backward(layer, training.backward(layer.unit), input_of(i));
  }
  maths_.embed_backward(tokens_, at_.gradient, training.backward(0).gradient(architecture_.table));
  return loss();
}

void Llama::take_in(std::span<const std::uint32_t> text) {
  const std::size_t count = batch_.positions(), length = batch_.context + 1;
  require(text.size() == batch_.sequences * length, Code::wrong_size, [&] {
    return Problem{.what = "cannot train on this text",
                   .needed = std::to_string(batch_.sequences * length) + " tokens",
                   .available = std::to_string(text.size())};
  });
  const auto largest = std::ranges::max_element(text);
  require(*largest < config_.vocabulary, Code::bad_argument, [&] {
    return Problem{.what = "cannot train on this text: it has the token " + std::to_string(*largest),
                   .needed = "tokens below the model's vocabulary, " + std::to_string(config_.vocabulary),
                   .remedy = "make the tokens with the tokenizer of this model"};
  });
  std::vector<std::uint32_t> all(3 * count);
  const std::span<std::uint32_t> ids(all.data(), count), targets(all.data() + count, count), order(all.data() + 2 * count, count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t at = i / batch_.context * length + i % batch_.context;
    ids[i] = text[at];
    targets[i] = text[at + 1];
  }
  std::iota(order.begin(), order.end(), 0u);
  std::ranges::stable_sort(order, {}, [&](std::uint32_t position) { return ids[position]; });
  maths_.upload(all.data(), at_.tokens.data(), at_.tokens.bytes());
  const auto* const there = reinterpret_cast<const std::uint32_t*>(at_.tokens.data());
  tokens_ = {.ids = there, .targets = there + count, .order = there + 2 * count, .count = count};
}

// Computes a layer up to the input of its last product.
void Llama::recompute(const Layer& layer, const Lease& lease, const ConstView& input) {
  const float epsilon = config_.epsilon;
  maths_.rms_norm(input, lease[layer.norm], epsilon, at_.normed);
  project(lease, layer.q, layer.q_bias, at_.raw_q);
  project(lease, layer.k, layer.k_bias, at_.raw_k);
  project(lease, layer.v, layer.v_bias, at_.v);
  if (config_.has_head_norms) {
    maths_.rms_norm(at_.raw_q, lease[layer.q_norm], epsilon, at_.q);
    maths_.rms_norm(at_.raw_k, lease[layer.k_norm], epsilon, at_.k);
  }
  maths_.rotate(at_.q, config_.head_width, at_.angles, config_.query_width(), false);
  maths_.rotate(at_.k, config_.head_width, at_.angles, config_.kv_width(), false);
  maths_.attention(attention_, {at_.q, at_.k, at_.v}, at_.attended, at_.sums);
  maths_.copy(input, at_.middle);
  linear(lease[layer.o], {at_.attended, config_.query_width()}, at_.middle, true);
  maths_.rms_norm(at_.middle, lease[layer.second_norm], epsilon, at_.second_normed);
  linear(lease[layer.gate], {at_.second_normed, config_.hidden}, at_.gate);
  linear(lease[layer.up], {at_.second_normed, config_.hidden}, at_.up);
  maths_.swiglu(at_.gate, at_.up, at_.activated);
}

void Llama::project(const Lease& lease, TensorId weight, TensorId bias, const View& to) {
  linear(lease[weight], {at_.normed, config_.hidden}, to);
  if (config_.has_biases) maths_.add_bias(lease[bias], to);
}

void Llama::forward(const Layer& layer, const Lease& lease, const ConstView& input, const View& output) {
  recompute(layer, lease, input);
  maths_.copy(at_.middle, output);
  linear(lease[layer.down], {at_.activated, config_.intermediate}, output, true);
}

// The gradient of the layer's output becomes that of its input.
void Llama::backward(const Layer& layer, const Lease& lease, const ConstView& input) {
  recompute(layer, lease, input);
  mlp_backward(layer, lease);
  attention_backward(layer, lease);
  maths_.rms_norm_backward(input, lease[layer.norm], config_.epsilon, at_.narrow_gradient, lease.gradient(layer.norm),
                           at_.gradient);
}

void Llama::mlp_backward(const Layer& layer, const Lease& lease) {
  linear_backward(lease, layer.down, {at_.activated, config_.intermediate}, at_.gradient, at_.wide_gradient);
  maths_.swiglu_backward(at_.gate, at_.up, at_.wide_gradient, at_.up_gradient);
  linear_backward(lease, layer.gate, {at_.second_normed, config_.hidden}, at_.wide_gradient, at_.narrow_gradient);
  linear_backward(lease, layer.up, {at_.second_normed, config_.hidden}, at_.up_gradient, at_.narrow_gradient, true);
  maths_.rms_norm_backward(at_.middle, lease[layer.second_norm], config_.epsilon, at_.narrow_gradient,
                           lease.gradient(layer.second_norm), at_.gradient);
}

void Llama::attention_backward(const Layer& layer, const Lease& lease) {
  linear_backward(lease, layer.o, {at_.attended, config_.query_width()}, at_.gradient, at_.attended_gradient);
  maths_.attention_backward(attention_, {at_.q, at_.k, at_.v}, {at_.attended, at_.sums, at_.attended_gradient},
                            {at_.q_gradient, at_.k_gradient, at_.v_gradient});
  maths_.rotate(at_.q_gradient, config_.head_width, at_.angles, config_.query_width(), true);
  maths_.rotate(at_.k_gradient, config_.head_width, at_.angles, config_.kv_width(), true);
  if (config_.has_head_norms) {
    maths_.clear(at_.raw_q_gradient);
    maths_.clear(at_.raw_k_gradient);
    maths_.rms_norm_backward(at_.raw_q, lease[layer.q_norm], config_.epsilon, at_.q_gradient,
                             lease.gradient(layer.q_norm), at_.raw_q_gradient);
    maths_.rms_norm_backward(at_.raw_k, lease[layer.k_norm], config_.epsilon, at_.k_gradient,
                             lease.gradient(layer.k_norm), at_.raw_k_gradient);
  }
  if (config_.has_biases) {
    maths_.add_rows(at_.raw_q_gradient, lease.gradient(layer.q_bias));
    maths_.add_rows(at_.raw_k_gradient, lease.gradient(layer.k_bias));
    maths_.add_rows(at_.v_gradient, lease.gradient(layer.v_bias));
  }
  linear_backward(lease, layer.q, {at_.normed, config_.hidden}, at_.raw_q_gradient, at_.narrow_gradient);
  linear_backward(lease, layer.k, {at_.normed, config_.hidden}, at_.raw_k_gradient, at_.narrow_gradient, true);
  linear_backward(lease, layer.v, {at_.normed, config_.hidden}, at_.v_gradient, at_.narrow_gradient, true);
}

// The loss and its gradient, a chunk of positions at a time, so that the head is gathered once and its logits are few.
void Llama::head(const Lease& lease) {
  const std::size_t positions = batch_.positions(), width = config_.hidden;
  const ConstView norm = lease[architecture_.norm];
  maths_.clear(at_.gradient);
  for (std::size_t first = 0; first < positions; first += batch_.chunk) {
    const std::size_t count = std::min(batch_.chunk, positions - first);
    const ConstView x = input_of(config_.layers).part(first * width, count * width);
    const View normed = at_.head_normed.part(0, count * width), gradient = at_.head_gradient.part(0, count * width);
    const View logits = at_.logits.part(0, count * config_.vocabulary);
    const View logits_gradient = at_.logits_gradient.part(0, logits.count());
    maths_.rms_norm(x, norm, config_.epsilon, normed);
    linear(lease[architecture_.head], {normed, width}, logits);
    maths_.cross_entropy(logits, tokens_.targets + first, 1.0f / static_cast<float>(positions),
                         at_.losses.part(first, count), logits_gradient);
    linear_backward(lease, architecture_.head, {normed, width}, logits_gradient, gradient);
    maths_.rms_norm_backward(x, norm, config_.epsilon, gradient, lease.gradient(architecture_.norm),
                             at_.gradient.part(first * width, count * width));
  }
}

double Llama::loss() {
  std::vector<float> losses(batch_.positions());
  maths_.download(at_.losses.data(), losses.data(), at_.losses.bytes());
  return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(losses.size());
}

void Llama::linear(const ConstView& weight, const ConstMatrix& x, const View& y, bool add) {
  const ConstMatrix weights(weight, x.columns);
  maths_.multiply({.a = x, .b = weights.transpose(), .to = Matrix(y, weights.rows), .add = add});
}

void Llama::linear_backward(const Lease& lease, TensorId weight, const ConstMatrix& x, const View& gradient,
                            const View& x_gradient, bool add) {
  const ConstMatrix weights(lease[weight], x.columns), gradients(gradient, weights.rows);
  maths_.multiply({.a = gradients.transpose(), .b = x, .to = Matrix(lease.gradient(weight), x.columns), .add = true});
  maths_.multiply({.a = gradients, .b = weights, .to = Matrix(x_gradient, x.columns), .add = add});
}

View Llama::input_of(std::size_t layer) const {
  const std::size_t elements = batch_.positions() * config_.hidden;
  return at_.inputs.part(layer * elements, elements);
}

}  // namespace ballast::llama
