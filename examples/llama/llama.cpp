#include "examples/llama/llama.h"

#include <algorithm>
#include <numeric>

#include "examples/llama/multiply.h"

namespace ballast::llama {

Activations::Activations(const Config& c, const Batch& batch, const Make& make) {
  const std::size_t positions = batch.positions(), chunk = std::min(batch.chunk, positions);
  const auto rows = [&](std::size_t width) { return make(positions * width, c.dtype, false); };
  const auto value = [&](std::size_t width) { return Value{rows(width), rows(width)}; };
  inputs = make((c.layers + 1) * batch.together * positions * c.hidden, c.dtype, batch.borders_on_host);
  gradients = make(batch.together * positions * c.hidden, c.dtype, batch.borders_on_host);
  input = value(c.hidden);
  middle = {rows(c.hidden), input.gradient};
  output = {rows(c.hidden), input.gradient};
  normed = value(c.hidden);
  second_normed = {rows(c.hidden), normed.gradient};
  raw_q = value(c.query_width());
  raw_k = value(c.kv_width());
  v = value(c.kv_width());
  q = c.has_head_norms ? value(c.query_width()) : raw_q;
  k = c.has_head_norms ? value(c.kv_width()) : raw_k;
  attended = value(c.query_width());
  up = value(c.intermediate);
  activated = value(c.intermediate);
  gate = {rows(c.intermediate), activated.gradient};
  head_normed = {make(chunk * c.hidden, c.dtype, false), make(chunk * c.hidden, c.dtype, false)};
  logits = {make(chunk * c.vocabulary, DType::fp32, false), make(chunk * c.vocabulary, c.dtype, false)};
  sums = make(positions * c.heads, DType::fp32, false);
  angles = make(batch.context * c.head_width, DType::fp32, false);
  ones = rows(1);
  losses = make(batch.together * positions, DType::fp32, false);
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
      at_(config, batch,
          [this](std::size_t count, DType dtype, bool on_host) {
            memory_.push_back(maths_.allocate(count * byte_size(dtype), on_host));
            return View(memory_.back().get(), count, dtype);
          }),
      attention_{batch.context, config.heads, config.kv_heads,   config.head_width, at_.q.data,
                 at_.k.data,    at_.v.data,   at_.attended.data, at_.sums} {
  std::vector<float> angles = rope_angles(config, batch.context), ones(batch.positions(), 1.0f);
  maths_.copy(std::span(angles), at_.angles);
  std::vector<std::byte> rounded(at_.ones.bytes());
  const View rounded_ones(rounded.data(), ones.size(), config.dtype);
  rows::write(ones, rounded_ones, 0);
  maths_.copy(rounded_ones, at_.ones);
  maths_.wait();
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
    maths_.embed(tokens_[m], lease[architecture_.table], at_.output.data);
    maths_.copy(at_.output.data, input_of(0, m));
  });
  for (std::size_t i = 0; i < config_.layers; ++i) {
    const Layer& layer = architecture_.layers[i];
    each_micro_batch([&](std::size_t m) {
      maths_.copy(input_of(i, m), at_.input.data);
      forward(layer, training.forward(layer.unit));
      maths_.copy(at_.output.data, input_of(i + 1, m));
    });
  }
  each_micro_batch([&](std::size_t m) {
    maths_.copy(input_of(config_.layers, m), at_.input.data);
    head(training.backward(config_.layers + 1), m);
    maths_.copy(at_.input.gradient, of(at_.gradients, m));
  });
  for (std::size_t i = config_.layers; i-- > 0;) {
    const Layer& layer = architecture_.layers[i];
    each_micro_batch([&](std::size_t m) {
      maths_.copy(input_of(i, m), at_.input.data);
      maths_.copy(of(at_.gradients, m), at_.output.gradient);
      backward(layer, training.backward(layer.unit));
      maths_.copy(at_.input.gradient, of(at_.gradients, m));
    });
  }
  each_micro_batch([&](std::size_t m) {
    const Lease lease = training.backward(0);
    maths_.copy(of(at_.gradients, m), at_.output.gradient);
    maths_.embed_backward(tokens_[m], at_.output.gradient, lease.gradient(architecture_.table));
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
  maths_.copy(ConstView(reinterpret_cast<const std::byte*>(all.data()), at_.tokens.count(), DType::u8), at_.tokens);
  maths_.wait();
}

// Computes a layer up to the input of its last product.
void Llama::compute(const Layer& layer, const Lease& lease) {
  norm(lease, layer.norm, at_.input, at_.normed);
  multiply(lease, layer.q, at_.normed, at_.raw_q);
  multiply(lease, layer.k, at_.normed, at_.raw_k);
  multiply(lease, layer.v, at_.normed, at_.v);
  if (config_.has_head_norms) {
    norm(lease, layer.q_norm, at_.raw_q, at_.q);
    norm(lease, layer.k_norm, at_.raw_k, at_.k);
  }
  maths_.rotate(at_.q.data, config_.head_width, at_.angles, config_.query_width(), false);
  maths_.rotate(at_.k.data, config_.head_width, at_.angles, config_.kv_width(), false);
  maths_.attention(attention_);
  maths_.copy(at_.input.data, at_.middle.data);
  multiply(lease, layer.o, at_.attended, at_.middle, true);
  norm(lease, layer.second_norm, at_.middle, at_.second_normed);
  multiply(lease, layer.gate, at_.second_normed, at_.gate);
  multiply(lease, layer.up, at_.second_normed, at_.up);
  maths_.swiglu(at_.gate.data, at_.up.data, at_.activated.data);
}

void Llama::forward(const Layer& layer, const Lease& lease) {
  compute(layer, lease);
  maths_.copy(at_.middle.data, at_.output.data);
  multiply(lease, layer.down, at_.activated, at_.output, true);
}

// The gradient of the layer's output becomes that of its input.
void Llama::backward(const Layer& layer, const Lease& lease) {
  compute(layer, lease);
  multiply_backward(lease, layer.down, at_.activated, at_.output);
  maths_.swiglu_backward(at_.gate.data, at_.up.data, at_.activated.gradient, at_.up.gradient);
  multiply_backward(lease, layer.gate, at_.second_normed, at_.gate);
  multiply_backward(lease, layer.up, at_.second_normed, at_.up, true);
  norm_backward(lease, layer.second_norm, at_.middle, at_.second_normed, true);
  multiply_backward(lease, layer.o, at_.attended, at_.middle);
  maths_.attention_backward(attention_, at_.attended.gradient, at_.q.gradient, at_.k.gradient, at_.v.gradient);
  maths_.rotate(at_.q.gradient, config_.head_width, at_.angles, config_.query_width(), true);
  maths_.rotate(at_.k.gradient, config_.head_width, at_.angles, config_.kv_width(), true);
  if (config_.has_head_norms) {
    norm_backward(lease, layer.q_norm, at_.raw_q, at_.q);
    norm_backward(lease, layer.k_norm, at_.raw_k, at_.k);
  }
  multiply_backward(lease, layer.q, at_.normed, at_.raw_q);
  multiply_backward(lease, layer.k, at_.normed, at_.raw_k, true);
  multiply_backward(lease, layer.v, at_.normed, at_.v, true);
  norm_backward(lease, layer.norm, at_.input, at_.normed, true);
}

void Llama::norm(const Lease& lease, TensorId weight, const Value& x, const Value& y) {
  maths_.rms_norm({x.data, lease[weight], config_.epsilon}, y.data);
}

void Llama::norm_backward(const Lease& lease, TensorId weight, const Value& x, const Value& y, bool add) {
  maths_.rms_norm_backward({x.data, lease[weight], config_.epsilon}, y.gradient, lease.gradient(weight), x.gradient,
                           add);
}

void Llama::multiply(const Lease& lease, const Linear& linear, const Value& x, const Value& y, bool add) {
  const ConstMatrix weight(lease[linear.weight], linear.inputs);
  const Matrix to(y.data, weight.rows);
  maths_.multiply({.a = {x.data, linear.inputs}, .b = weight.transpose(), .to = to, .add = add});
  if (linear.bias) maths_.multiply({.a = {at_.ones, 1}, .b = {lease[*linear.bias], to.columns}, .to = to, .add = true});
}

void Llama::multiply_backward(const Lease& lease, const Linear& linear, const Value& x, const Value& y, bool add) {
  const ConstMatrix weight(lease[linear.weight], linear.inputs), gradient(y.gradient, weight.rows);
  const auto add_to = [&](TensorId parameter, const ConstMatrix& from) {
    const Matrix to(lease.gradient(parameter), from.columns);
    maths_.multiply({.a = gradient.transpose(), .b = from, .to = to, .add = true});
  };
  add_to(linear.weight, {x.data, linear.inputs});
  if (linear.bias) add_to(*linear.bias, {at_.ones, 1});
  maths_.multiply({.a = gradient, .b = weight, .to = {x.gradient, linear.inputs}, .add = add});
}

// The loss and its gradient, a chunk of positions at a time, so that the head is gathered once and its logits are few.
void Llama::head(const Lease& lease, std::size_t micro_batch) {
  const std::size_t positions = batch_.positions();
  for (std::size_t first = 0; first < positions; first += batch_.chunk) {
    const std::size_t count = std::min(batch_.chunk, positions - first);
    const auto part = [&](const Value& of, std::size_t begin, std::size_t width) {
      return Value{of.data.part(begin * width, count * width), of.gradient.part(begin * width, count * width)};
    };
    const Value x = part(at_.input, first, config_.hidden), normed = part(at_.head_normed, 0, config_.hidden);
    const Value logits = part(at_.logits, 0, config_.vocabulary);
    norm(lease, architecture_.norm, x, normed);
    multiply(lease, architecture_.head, normed, logits);
    maths_.cross_entropy(logits.data, tokens_[micro_batch].targets + first, 1.0f / static_cast<float>(positions),
                         at_.losses.part(micro_batch * positions + first, count), logits.gradient);
    multiply_backward(lease, architecture_.head, normed, logits);
    norm_backward(lease, architecture_.norm, x, normed);
  }
}

double Llama::loss() {
  std::vector<float> losses(at_.losses.count());
  maths_.copy(at_.losses, std::span(losses));
  maths_.wait();
  double sum = 0;
  each_micro_batch([&](std::size_t m) {
    const std::span<const float> own = std::span(losses).subspan(m * batch_.positions(), batch_.positions());
    sum += std::accumulate(own.begin(), own.end(), 0.0) / static_cast<double>(own.size());
  });
  return sum;
}

View Llama::of(const View& all, std::size_t micro_batch) const {
  const std::size_t elements = batch_.positions() * config_.hidden;
  return all.part(micro_batch * elements, elements);
}

View Llama::input_of(std::size_t layer, std::size_t micro_batch) const {
  return of(at_.inputs, layer * batch_.together + micro_batch);
}

}  // namespace ballast::llama
