// Each formula of the layers, compared with finite differences.
#include "examples/gpt/maths.h"
#include "tests/gpt/differences.h"

using namespace ballast;
using namespace ballast::gpt;
using namespace ballast::testing;

TEST_CASE("the gradient of a layer norm is its slope, and is added to the gradients before it") {
  const auto maths = cpu_maths(2);
  for (const std::size_t width : {16u, 37u}) {
    const std::size_t count = 40;
    Floats x = random_floats(count * width, 1), weight = random_floats(width, 2), bias = random_floats(width, 3);
    Floats slope = random_floats(count * width, 4), y(count * width);
    const LayerNorm norm{view_of(weight), view_of(bias)};
    const auto value = [&] {
      maths->layer_norm(view_of(x), norm, view_of(y));
      return weighed(y, slope);
    };
    Floats of_x(x.size(), 1.0f), of_weight(width, 2.0f), of_bias(width, 3.0f);
    maths->layer_norm_backward(view_of(x), norm, view_of(slope), {view_of(of_weight), view_of(of_bias), view_of(of_x)});
    for (const auto& [gradient, was] : {std::pair{&of_x, 1.0f}, {&of_weight, 2.0f}, {&of_bias, 3.0f}}) {
      for (float& number : *gradient)
        number -= was;
    }
    check_gradient(value, x, of_x);
    check_gradient(value, weight, of_weight);
    check_gradient(value, bias, of_bias);
  }
}

TEST_CASE("the gradient of gelu is its slope, and gelu is x far above zero and 0 far below") {
  const auto maths = cpu_maths(2);
  Floats x = random_floats(200, 1, 4.0f), slope = random_floats(200, 2), y(200);
  const auto value = [&] {
    maths->gelu(view_of(x), view_of(y));
    return weighed(y, slope);
  };
  Floats gradient = slope;
  maths->gelu_backward(view_of(x), view_of(gradient));
  check_gradient(value, x, gradient);
  Floats far{-1000.0f, -20.0f, 0.0f, 20.0f, 1000.0f};
  maths->gelu(view_of(far), view_of(far));
  CHECK(std::abs(far[0]) < 1e-30f);
  CHECK(std::abs(far[1]) < 1e-6f);
  CHECK(far[2] == 0.0f);
  CHECK(far[3] == 20.0f);
  CHECK(far[4] == 1000.0f);
}

TEST_CASE("the gradient of cross entropy is its slope, and the loss of a certain prediction is zero") {
  const auto maths = cpu_maths(2);
  const std::size_t count = 20, width = 33;
  Floats logits = random_floats(count * width, 1, 3.0f), losses(count), gradient(logits.size());
  std::vector<std::uint8_t> bytes(count);
  for (std::size_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<std::uint8_t>(i * 7 % width);
  }
  const auto value = [&] {
    maths->cross_entropy(view_of(logits), {View(std::span(bytes)), view_of(losses), view_of(gradient)});
    double sum = 0;
    for (const float loss : losses)
      sum += double{loss};
    return sum / count;
  };
  value();
  const Floats found = gradient;
  check_gradient(value, logits, found);
  for (std::size_t i = 0; i < count; ++i) {
    logits[i * width + bytes[i]] = 100.0f;
  }
  CHECK(value() == 0.0);
}

TEST_CASE("the gradient of attention is its slope, and no position sees a later one") {
  const auto maths = cpu_maths(2);
  for (const std::size_t context : {9u, 150u}) {  // less than a block of queries, and more
    const AttentionShape shape{.batch = 2, .context = context, .heads = context < 100 ? 3u : 1u, .head_width = 4};
    const std::size_t positions = shape.batch * context;
    Floats qkv = random_floats(positions * 3 * shape.width(), 1), slope = random_floats(positions * shape.width(), 2);
    Floats y(slope.size()), gradient(qkv.size());
    const auto value = [&] {
      maths->attention(shape, view_of(qkv), view_of(y));
      return weighed(y, slope);
    };
    maths->attention_backward(shape, view_of(qkv), view_of(slope), view_of(gradient));
    check_gradient(value, qkv, gradient);
    value();
    const Floats before = y;
    std::fill(qkv.end() - std::ptrdiff_t(3 * shape.width()), qkv.end(), 9.0f);  // the last position
    value();
    CHECK(std::equal(y.begin(), y.end() - std::ptrdiff_t(shape.width()), before.begin()));
    CHECK(y != before);
  }
}

TEST_CASE("the gradients of both embedding tables are their slopes") {
  const auto maths = cpu_maths(2);
  const std::size_t context = 5, width = 70, batch = 3;
  Floats tokens = random_floats(256 * width, 1), positions = random_floats(context * width, 2);
  Floats slope = random_floats(batch * context * width, 3), y(slope.size());
  std::vector<std::uint8_t> bytes{1, 2, 3, 1, 1, 255, 0, 2, 2, 7, 7, 7, 7, 7, 7};
  const View text{std::span(bytes)};
  const auto value = [&] {
    maths->embed(text, {view_of(tokens), view_of(positions)}, view_of(y));
    return weighed(y, slope);
  };
  Floats of_tokens(tokens.size()), of_positions(positions.size());
  maths->embed_backward(text, view_of(slope), {view_of(of_tokens), view_of(of_positions)});
  check_gradient(value, positions, of_positions);
  Floats few(tokens.begin(), tokens.begin() + std::ptrdiff_t(8 * width));  // the rows that are read, but for one
  const auto value_of_few = [&] {
    std::copy(few.begin(), few.end(), tokens.begin());
    return value();
  };
  check_gradient(value_of_few, few, Floats(of_tokens.begin(), of_tokens.begin() + std::ptrdiff_t(few.size())));
}
