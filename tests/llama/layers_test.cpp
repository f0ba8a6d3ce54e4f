// Each formula of the layers, compared with finite differences.
#include <numeric>

#include "examples/llama/maths.h"
#include "tests/llama/differences.h"

using namespace ballast;
using namespace ballast::llama;
using namespace ballast::testing;

TEST_CASE("the gradient of a norm is its slope, and is added to the gradients before it") {
  const auto maths = cpu_maths(2);
  for (const std::size_t width : {16u, 37u}) {
    const std::size_t count = 40;
    Floats x = random_floats(count * width, 1), weight = random_floats(width, 2);
    Floats slope = random_floats(count * width, 4), y(count * width);
    const auto value = [&] {
      maths->rms_norm({view_of(x), view_of(weight), 1e-5f}, view_of(y));
      return weighed(y, slope);
    };
    for (const bool add : {true, false}) {
      Floats of_x(x.size(), 1.0f), of_weight(width, 2.0f);
      maths->rms_norm_backward({view_of(x), view_of(weight), 1e-5f}, view_of(slope), view_of(of_weight), view_of(of_x),
                               add);
      for (const auto& [gradient, was] : {std::pair{&of_x, add ? 1.0f : 0.0f}, {&of_weight, 2.0f}}) {
        for (float& number : *gradient)
          number -= was;
      }
      check_gradient(value, x, of_x);
      check_gradient(value, weight, of_weight);
    }
  }
}

TEST_CASE("the gradients of swiglu are its slopes") {
  const auto maths = cpu_maths(2);
  Floats gate = random_floats(200, 1, 4.0f), up = random_floats(200, 2), slope = random_floats(200, 3), y(200);
  const auto value = [&] {
    maths->swiglu(view_of(gate), view_of(up), view_of(y));
    return weighed(y, slope);
  };
  Floats of_gate = slope, of_up(200);
  maths->swiglu_backward(view_of(gate), view_of(up), view_of(of_gate), view_of(of_up));
  check_gradient(value, gate, of_gate);
  check_gradient(value, up, of_up);
  Floats far{-1000.0f, -20.0f, 0.0f, 20.0f, 1000.0f}, ones(5, 1.0f);
  maths->swiglu(view_of(far), view_of(ones), view_of(far));
  CHECK(std::abs(far[0]) < 1e-30f);
  CHECK(far[2] == 0.0f);
  CHECK(far[4] == 1000.0f);
}

TEST_CASE("a rotation back is the gradient of a rotation, and undoes it") {
  const auto maths = cpu_maths(2);
  const std::size_t context = 5, head_width = 8, row_width = 24;
  Floats angles(context * head_width);
  for (std::size_t i = 0; i < angles.size(); ++i) {
    const auto angle = static_cast<float>(i / head_width * (i % (head_width / 2) + 1));
    angles[i] = i % head_width < head_width / 2 ? std::cos(angle) : std::sin(angle);
  }
  const Floats before = random_floats(2 * context * row_width, 1), slope = random_floats(before.size(), 2);
  Floats x = before, back = slope;
  maths->rotate(view_of(x), head_width, view_of(angles), row_width, false);
  maths->rotate(view_of(back), head_width, view_of(angles), row_width, true);
  CHECK(weighed(x, slope) == Approx(weighed(before, back)));  // a rotation is linear
  CHECK(x != before);
  maths->rotate(view_of(x), head_width, view_of(angles), row_width, true);
  for (std::size_t i = 0; i < x.size(); ++i)
    CHECK(x[i] == Approx(before[i]).margin(1e-5));
}

TEST_CASE("the gradient of cross entropy is its slope, and the loss of a certain prediction is zero") {
  const auto maths = cpu_maths(2);
  const std::size_t count = 20, width = 33;
  Floats logits = random_floats(count * width, 1, 3.0f), losses(count), gradient(logits.size());
  std::vector<std::uint32_t> targets(count);
  for (std::size_t i = 0; i < count; ++i)
    targets[i] = static_cast<std::uint32_t>(i * 7 % width);
  const auto value = [&] {
    maths->cross_entropy(view_of(logits), targets.data(), 1.0f / count, view_of(losses), view_of(gradient));
    return std::accumulate(losses.begin(), losses.end(), 0.0) / count;
  };
  value();
  const Floats found = gradient;
  check_gradient(value, logits, found);
  for (std::size_t i = 0; i < count; ++i)
    logits[i * width + targets[i]] = 100.0f;
  CHECK(value() == 0.0);
}

TEST_CASE("the gradients of attention are its slopes, and no position sees a later one") {
  const auto maths = cpu_maths(2);
  for (const std::size_t context : {9u, 150u}) {  // less than a block of queries, and more
    const std::size_t kv_heads = context < 100 ? 2 : 1, positions = kv_heads * context, kv_width = kv_heads * 4;
    Floats q = random_floats(positions * 16, 1), k = random_floats(positions * kv_width, 2);
    Floats v = random_floats(positions * kv_width, 3), slope = random_floats(q.size(), 4);
    Floats y(q.size()), sums(positions * 4), of_q(q.size()), of_k(k.size()), of_v(v.size());
    const Attention attention{context, 4, kv_heads, 4, view_of(q), view_of(k), view_of(v), view_of(y), view_of(sums)};
    const auto value = [&] {
      maths->attention(attention);
      return weighed(y, slope);
    };
    value();
    maths->attention_backward(attention, view_of(slope), view_of(of_q), view_of(of_k), view_of(of_v));
    check_gradient(value, q, of_q);
    check_gradient(value, k, of_k);
    check_gradient(value, v, of_v);
    value();
    const Floats before = y;
    std::fill(v.end() - std::ptrdiff_t(kv_width), v.end(), 9.0f);  // the last position
    value();
    CHECK(std::equal(y.begin(), y.end() - 16, before.begin()));
    CHECK(y != before);
  }
}

TEST_CASE("the gradient of an embedding is its slope") {
  const auto maths = cpu_maths(2);
  const std::size_t width = 70;
  const std::vector<std::uint32_t> ids{1, 2, 3, 1, 1, 9, 0, 2, 2, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7};
  std::vector<std::uint32_t> order(ids.size());
  std::iota(order.begin(), order.end(), 0u);
  std::ranges::stable_sort(order, {}, [&](std::uint32_t position) { return ids[position]; });
  const Tokens tokens{.ids = ids.data(), .order = order.data(), .count = ids.size()};
  Floats table = random_floats(10 * width, 1), slope = random_floats(ids.size() * width, 3), y(slope.size());
  const auto value = [&] {
    maths->embed(tokens, view_of(table), view_of(y));
    return weighed(y, slope);
  };
  Floats of_table(table.size());
  maths->embed_backward(tokens, view_of(slope), view_of(of_table));
  check_gradient(value, table, of_table);
}
