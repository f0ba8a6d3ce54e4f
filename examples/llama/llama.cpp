#include "examples/llama/llama.h"

#include <algorithm>
#include <numeric>

namespace ballast::llama {

Activations::Activations(const Config& c, const Batch& batch, const Make& make) {
  const std::size_t positions = batch.positions(), chunk = std::min(batch.chunk, positions);
  const auto rows = [&](std::size_t width) { return make(positions * width, c.dtype, false); };
  inputs = make((c.layers + 1) * batch.together * positions * c.hidden, c.dtype, batch.borders_on_host);
  gradients = make(batch.together * positions * c.hidden, c.dtype, batch.borders_on_host);
  for (View* const view : {&input, &output, &gradient, &normed, &middle, &second_normed, &narrow_gradient})
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
  sums = make(positions * c.heads, DType::fp32, false);
  head_normed = make(chunk * c.hidden, c.dtype, false);
  head_gradient = make(chunk * c.hidden, c.dtype, false);
  logits = make(chunk * c.vocabulary, DType::fp32, false);
  logits_gradient = make(chunk * c.vocabulary, c.dtype, false);
  losses = make(batch.together * positions, DType::fp32, false);
  angles = make(batch.context * c.head_width, DType::fp32, false);
  tokens = make(3 * batch.together * positions * sizeof(std::uint32_t), DType::u8, false);
}

std::size_t activation_bytes(const Config& config, const Batch& batch) {
  std::size_t bytes = 0;
  const Activations counted(config, batch, [&](std::size_t count, DType dtype, bool) {
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
      at_(config, batch, [this](std::size_t count, DType dtype, bool on_host) {
        memory_.push_back(maths_.allocate(count * byte_size(dtype), on_host));
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
  for (std::size_t unit = head_unit + 1; unit-- > 0;)
    trace.push_back({unit, Phase::backward});
  return trace;
}

template <class Body>
void Llama::each_micro_batch(const Body& body) const {
  for (std::size_t micro_batch = 0; micro_batch < batch_.together; ++micro_batch)
    body(micro_batch);
}

double Llama::run(Training& training, std::span<const std::uint32_t> text) {
  take_in(text);
  each_micro_batch([&](std::size_t m) {
    const Lease lease = training.forward(0);
    maths_.embed(tokens_[m], lease[architecture_.table], at_.output);
    maths_.copy(at_.output, input_of(0, m));
  });
  for (std::size_t i = 0; i < config_.layers; ++i) {
    const Layer& layer = architecture_.layers[i];
    each_micro_batch([&](std::size_t m) {
      maths_.copy(input_of(i, m), at_.input);
      forward(layer, training.forward(layer.unit));
      maths_.copy(at_.output, input_of(i + 1, m));
    });
  }
  each_micro_batch([&](std::size_t m) {
    maths_.copy(input_of(config_.layers, m), at_.input);
    head(training.backward(config_.layers + 1), m);
    maths_.copy(at_.gradient, of(at_.gradients, m));
  });
  for (std::size_t i = config_.layers; i-- > 0;) {
    const Layer& layer = architecture_.layers[i];
    each_micro_batch([&](std::size_t m) {
      maths_.copy(input_of(i, m), at_.input);
      maths_.copy(of(at_.gradients, m), at_.gradient);
      backward(layer, training.backward(layer.unit));
      maths_.copy(at_.gradient, of(at_.gradients, m));
    });
  }
  each_micro_batch([&](std::size_t m) {
    const Lease lease = training.backward(0);
    maths_.copy(of(at_.gradients, m), at_.gradient);
    maths_.embed_backward(tokens_[m], at_.gradient, lease.gradient(architecture_.table));
  });
  return loss();
}

void Llama::take_in(std::span<const std::uint32_t> text) {
  const std::size_t count = batch_.positions(), length = batch_.context + 1;
  require(text.size() == batch_.together * batch_.sequences * length, Code::wrong_size, [&] {
    return Problem{.what = "cannot train on this text",
                   .needed = std::to_string(batch_.together * batch_.sequences * length) + " tokens",
                   .available = std::to_string(text.size())};
  });
  const auto largest = std::ranges::max_element(text);
  require(*largest < config_.vocabulary, Code::bad_argument, [&] {
    return Problem{.what = "cannot train on this text: it has the token " + std::to_string(*largest),
                   .needed = "tokens below the model's vocabulary, " + std::to_string(config_.vocabulary),
                   .remedy = "make the tokens with the tokenizer of this model"};
  });
  std::vector<std::uint32_t> all;
  tokens_.clear();
  each_micro_batch([&](std::size_t m) {
    const std::span<const std::uint32_t> own = text.subspan(m * batch_.sequences * length, batch_.sequences * length);
    std::vector<std::uint32_t> ids(count), targets(count), order(count);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t at = i / batch_.context * length + i % batch_.context;
      ids[i] = own[at];
      targets[i] = own[at + 1];
    }
    std::iota(order.begin(), order.end(), 0u);
    std::ranges::stable_sort(order, {}, [&](std::uint32_t position) { return ids[position]; });
    const auto* const there = reinterpret_cast<const std::uint32_t*>(at_.tokens.data()) + all.size();
    tokens_.push_back({.ids = there, .targets = there + count, .order = there + 2 * count, .count = count});
    for (const std::vector<std::uint32_t>& part : {ids, targets, order})
      all.insert(all.end(), part.begin(), part.end());
  });
  maths_.upload(all.data(), at_.tokens.data(), at_.tokens.bytes());
}

// Computes a layer up to the input of its last product.
void Llama::recompute(const Layer& layer, const Lease& lease) {
  const float epsilon = config_.epsilon;
  maths_.rms_norm(at_.input, lease[layer.norm], epsilon, at_.normed);
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
  maths_.copy(at_.input, at_.middle);
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

void Llama::forward(const Layer& layer, const Lease& lease) {
  recompute(layer, lease);
  maths_.copy(at_.middle, at_.output);
  linear(lease[layer.down], {at_.activated, config_.intermediate}, at_.output, true);
}

// The gradient of the layer's output becomes that of its input.
void Llama::backward(const Layer& layer, const Lease& lease) {
  recompute(layer, lease);
  mlp_backward(layer, lease);
  attention_backward(layer, lease);
  maths_.rms_norm_backward(at_.input, lease[layer.norm], config_.epsilon, at_.narrow_gradient,
                           lease.gradient(layer.norm), at_.gradient);
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
void Llama::head(const Lease& lease, std::size_t micro_batch) {
  const std::size_t positions = batch_.positions(), width = config_.hidden;
  const ConstView norm = lease[architecture_.norm];
  maths_.clear(at_.gradient);
  for (std::size_t first = 0; first < positions; first += batch_.chunk) {
    const std::size_t count = std::min(batch_.chunk, positions - first);
    const ConstView x = at_.input.part(first * width, count * width);
    const View normed = at_.head_normed.part(0, count * width), gradient = at_.head_gradient.part(0, count * width);
    const View logits = at_.logits.part(0, count * config_.vocabulary);
    const View logits_gradient = at_.logits_gradient.part(0, logits.count());
    maths_.rms_norm(x, norm, config_.epsilon, normed);
    linear(lease[architecture_.head], {normed, width}, logits);
    maths_.cross_entropy(logits, tokens_[micro_batch].targets + first, 1.0f / static_cast<float>(positions),
                         at_.losses.part(micro_batch * positions + first, count), logits_gradient);
    linear_backward(lease, architecture_.head, {normed, width}, logits_gradient, gradient);
    maths_.rms_norm_backward(x, norm, config_.epsilon, gradient, lease.gradient(architecture_.norm),
                             at_.gradient.part(first * width, count * width));
  }
}

double Llama::loss() {
  std::vector<float> losses(at_.losses.count());
  maths_.download(at_.losses.data(), losses.data(), at_.losses.bytes());
  double sum = 0;
  each_micro_batch([&](std::size_t m) {
    const std::span<const float> own = std::span(losses).subspan(m * batch_.positions(), batch_.positions());
    sum += std::accumulate(own.begin(), own.end(), 0.0) / static_cast<double>(own.size());
  });
  return sum;
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

View Llama::of(const View& all, std::size_t micro_batch) const {
  const std::size_t elements = batch_.positions() * config_.hidden;
  return all.part(micro_batch * elements, elements);
}

View Llama::input_of(std::size_t layer, std::size_t micro_batch) const {
  return of(at_.inputs, layer * batch_.together + micro_batch);
}

}  // namespace ballast::llama
