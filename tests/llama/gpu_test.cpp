// Compares the arithmetic on a GPU with that on the CPU.
#include <numeric>

#include "examples/llama/maths.h"
#include "tests/llama/differences.h"
#include "tests/llama/training_rig.h"

using namespace ballast;
using namespace ballast::llama;
using namespace ballast::testing;
using Catch::Contains;

namespace {

// Arguments and results of a function, in memory of one kind of maths. Equal seeds give equal values.
class Place {
 public:
  Place(Maths& maths, DType dtype) : maths_(maths), dtype_(dtype) {}

  View values(std::size_t count, std::uint64_t seed, float size = 1.0f) {
    return put(random_floats(count, seed, size), dtype_);
  }
  View floats(std::size_t count, std::uint64_t seed, float size = 1.0f) {
    return put(random_floats(count, seed, size), DType::fp32);
  }

  Tokens tokens(const std::vector<std::uint32_t>& ids) {
    std::vector<std::uint32_t> order(ids.size());
    std::iota(order.begin(), order.end(), 0u);
    std::ranges::stable_sort(order, {}, [&](std::uint32_t position) { return ids[position]; });
    const std::uint32_t* const there = put(ids);
    return {.ids = there, .targets = there, .order = put(order), .count = ids.size()};
  }

  Floats read(const View& from) {
    std::vector<std::byte> bytes(from.bytes());
    maths_.copy(from, View(bytes.data(), from.count(), from.dtype()));
    maths_.wait();
    Floats to(from.count());
    for (std::size_t i = 0; i < to.size(); ++i) {
      std::uint32_t bits = 0;
      std::byte* const high = reinterpret_cast<std::byte*>(&bits) + sizeof bits - byte_size(from.dtype());
      std::copy_n(&bytes[i * byte_size(from.dtype())], byte_size(from.dtype()), high);
      to[i] = std::bit_cast<float>(bits);
    }
    return to;
  }

  Maths& maths() { return maths_; }

 private:
  View reserve(std::size_t count, DType dtype) {
    memory_.push_back(maths_.allocate(count * byte_size(dtype), false));
    return {memory_.back().get(), count, dtype};
  }

  const std::uint32_t* put(const std::vector<std::uint32_t>& from) {
    const View to = reserve(from.size() * sizeof from[0], DType::u8);
    maths_.copy(ConstView(reinterpret_cast<const std::byte*>(from.data()), to.count(), DType::u8), to);
    maths_.wait();
    return reinterpret_cast<const std::uint32_t*>(to.data());
  }

  View put(const Floats& from, DType dtype) {
    const View to = reserve(from.size(), dtype);
    std::vector<bf16> halves(from.size());
    for (std::size_t i = 0; i < from.size(); ++i)
      halves[i] = {static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(from[i]) >> 16)};
    maths_.copy(dtype == DType::fp32 ? ConstView(std::span(from)) : ConstView(std::span(halves)), to);
    maths_.wait();
    return to;
  }

  Maths& maths_;
  DType dtype_;
  std::vector<std::shared_ptr<std::byte>> memory_;
};

using Views = std::vector<View>;
using Function = std::function<Views(Place&)>;  // returns its results

// Checks that results are near: a GPU's sums have another order, and in bf16 a sum that rounds differently changes later results.
void check_near(const Floats& found, const Floats& expected, float tolerance) {
  REQUIRE(found.size() == expected.size());
  float largest = 0, worst = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    largest = std::max(largest, std::abs(expected[i]));
    worst = std::max(worst, found[i] == expected[i] ? 0.0f : std::abs(found[i] - expected[i]));
    if (found[i] != found[i]) worst = INFINITY;
  }
  CHECK(largest > 0);
  CHECK(worst <= largest * tolerance);
}

void check_on_gpu(const Function& function) {
  const auto on_gpu = gpu_maths(0), on_cpu = cpu_maths(2);
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    CAPTURE(name(dtype));
    Place gpu(*on_gpu, dtype), again(*on_gpu, dtype), cpu(*on_cpu, dtype);
    const Views found = function(gpu), second = function(again), expected = function(cpu);
    for (std::size_t i = 0; i < found.size(); ++i) {
      CAPTURE(i);
      const Floats first = gpu.read(found[i]);
      check_near(first, cpu.read(expected[i]), dtype == DType::fp32 ? 1e-5f : 0.01f);
      CHECK(first == again.read(second[i]));
    }
  }
}

}  // namespace

TEST_CASE("products on a GPU agree with those on the CPU", "[gpu]") {
  const std::size_t rows = 70, depth = 40, columns = 24;
  for (const bool add : {false, true}) {
    for (const unsigned turned : {0u, 1u, 2u, 4u, 7u}) {
      CAPTURE(add, turned);
      check_on_gpu([&](Place& at) -> Views {
        const View a = at.values(rows * depth, 1), b = at.values(depth * columns, 2), to = at.values(rows * columns, 3);
        const View logits = at.floats(rows * columns, 4);
        const auto matrix = [&](const auto& view, std::size_t down, std::size_t across, bool transposed) {
          return transposed ? BasicMatrix(view, down).transpose() : BasicMatrix(view, across);
        };
        const ConstMatrix left = matrix(ConstView(a), rows, depth, turned & 1),
                          right = matrix(ConstView(b), depth, columns, turned & 2);
        at.maths().multiply({.a = left, .b = right, .to = matrix(to, rows, columns, turned & 4), .add = add});
        at.maths().multiply({.a = left, .b = right, .to = Matrix(logits, columns), .add = add});
        const View part = at.values(rows * columns, 5);
        at.maths().multiply({.a = left.part(3, 7, 2, 9),
                             .b = right.part(2, 9, 8, 5),
                             .to = Matrix(part, columns).part(1, 7, 4, 5),
                             .add = add});
        return {to, logits, part};
      });
    }
  }
}

TEST_CASE("products with ones on a GPU, for biases and sums of rows, agree with those on the CPU", "[gpu]") {
  for (const auto& [rows, width] : {std::pair{1u, 8u}, {70u, 264u}, {1100u, 72u}}) {
    CAPTURE(rows, width);
    check_on_gpu(
        [rows = rows, width = width](Place& at) -> Views {  // Clang 14 captures no structured binding by reference
          const View ones = at.values(rows, 1), bias = at.values(width, 2), to = at.values(rows * width, 3),
                     sum = at.values(width, 4);
          at.maths().multiply({.a = {ones, 1}, .b = {bias, width}, .to = {to, width}, .add = true});
          at.maths().multiply({.a = {ones, rows}, .b = {to, width}, .to = {sum, width}, .add = true});
          return {to, sum};
        });
  }
}

TEST_CASE("embeddings on a GPU agree with those on the CPU", "[gpu]") {
  std::vector<std::uint32_t> ids{1, 2, 3, 1, 1, 9, 0, 2, 2};
  ids.resize(40, 7);
  for (const std::size_t width : {8u, 72u, 2056u}) {
    CAPTURE(width);
    check_on_gpu([&](Place& at) -> Views {
      const Tokens tokens = at.tokens(ids);
      const View table = at.values(10 * width, 1), to = at.values(ids.size() * width, 2),
                 of_table = at.values(10 * width, 3);
      at.maths().embed(tokens, table, to);
      at.maths().embed_backward(tokens, at.values(to.count(), 4), of_table);
      return {to, of_table};
    });
  }
}

TEST_CASE("norms on a GPU agree with those on the CPU", "[gpu]") {
  for (const auto& [rows, width] : {std::pair{5u, 8u}, {5000u, 128u}, {70u, 264u}, {520u, 2056u}}) {
    CAPTURE(rows, width);
    check_on_gpu(
        [rows = rows, width = width](Place& at) -> Views {  // Clang 14 captures no structured binding by reference
          const View x = at.values(rows * width, 1), weight = at.values(width, 2), to = at.values(x.count(), 3);
          const View of_x = at.values(x.count(), 4), of_weight = at.values(width, 5);
          const View added = at.values(x.count(), 4);
          at.maths().rms_norm({x, weight, 1e-5f}, to);
          at.maths().rms_norm_backward({x, weight, 1e-5f}, at.values(x.count(), 6), of_weight, of_x, false);
          at.maths().rms_norm_backward({x, weight, 1e-5f}, at.values(x.count(), 6), of_weight, added, true);
          return {to, of_x, added, of_weight};
        });
  }
}

TEST_CASE("rotations on a GPU agree with those on the CPU", "[gpu]") {
  for (const std::size_t head_width : {8u, 64u}) {
    CAPTURE(head_width);
    check_on_gpu([&](Place& at) -> Views {
      const View x = at.values(14 * 3 * head_width, 1), y = at.values(x.count(), 1),
                 angles = at.floats(7 * head_width, 2);
      at.maths().rotate(x, head_width, angles, 3 * head_width, false);
      at.maths().rotate(y, head_width, angles, 3 * head_width, true);
      return {x, y};
    });
  }
}

TEST_CASE("swiglu on a GPU agrees with that on the CPU", "[gpu]") {
  check_on_gpu([](Place& at) -> Views {
    const View gate = at.values(5000, 1, 4.0f), up = at.values(5000, 2), to = at.values(5000, 3);
    const View gradient = at.values(5000, 4), of_up = at.values(5000, 5);
    at.maths().swiglu(gate, up, to);
    at.maths().swiglu_backward(gate, up, gradient, of_up);
    return {to, gradient, of_up};
  });
}

TEST_CASE("cross entropy on a GPU agrees with that on the CPU", "[gpu]") {
  for (const std::size_t width : {33u, 3000u}) {
    CAPTURE(width);
    check_on_gpu([&](Place& at) -> Views {
      const std::size_t rows = 9;
      std::vector<std::uint32_t> targets(rows);
      for (std::size_t i = 0; i < rows; ++i)
        targets[i] = static_cast<std::uint32_t>(i * 131 % width);
      const View logits = at.floats(rows * width, 1, 20.0f), losses = at.floats(rows, 2),
                 gradient = at.values(logits.count(), 3);
      at.maths().cross_entropy(logits, at.tokens(targets).ids, 0.25f, losses, gradient);
      return {losses, gradient};
    });
  }
}

TEST_CASE("attention on a GPU agrees with that on the CPU", "[gpu]") {
  for (const Attention& shape : {Attention{.context = 70, .heads = 4, .kv_heads = 2, .head_width = 32},
                                 {.context = 2, .heads = 1, .kv_heads = 1, .head_width = 8},
                                 {.context = 33, .heads = 3, .kv_heads = 1, .head_width = 24},
                                 {.context = 130, .heads = 2, .kv_heads = 2, .head_width = 64},
                                 {.context = 100, .heads = 2, .kv_heads = 1, .head_width = 128},
                                 {.context = 70, .heads = 1, .kv_heads = 1, .head_width = 200}}) {
    CAPTURE(shape.context, shape.head_width);
    check_on_gpu([&](Place& at) -> Views {
      const std::size_t positions = 2 * shape.context;
      const std::size_t width = positions * shape.heads * shape.head_width,
                        kv_width = positions * shape.kv_heads * shape.head_width;
      const View q = at.values(width, 1, 2.0f), k = at.values(kv_width, 2, 2.0f), v = at.values(kv_width, 3);
      const View y = at.values(width, 4), sums = at.floats(positions * shape.heads, 5);
      const View of_q = at.values(width, 6), of_k = at.values(kv_width, 7), of_v = at.values(kv_width, 8);
      const Attention of{shape.context, shape.heads, shape.kv_heads, shape.head_width, q, k, v, y, sums};
      at.maths().attention(of);
      at.maths().attention_backward(of, at.values(width, 9), of_q, of_k, of_v);
      return {y, sums, of_q, of_k, of_v};
    });
  }
}

TEST_CASE("a GPU refuses heads that are too wide, and rows that are not aligned", "[gpu]") {
  const auto maths = gpu_maths(0);
  Place at(*maths, DType::bf16);
  const View x = at.values(4 * 264, 1), sums = at.floats(4, 2);
  CHECK_THROWS_WITH(maths->attention({4, 1, 1, 264, x, x, x, x, sums}), Contains("heads are too wide"));
  CHECK_THROWS_WITH(maths->rms_norm({x.part(0, 24), x.part(0, 12), 1e-5f}, x.part(0, 24)),
                    Contains("rows of 12 elements are not aligned"));
  CHECK_THROWS_WITH(maths->rms_norm({x.part(0, 24), x.part(4, 8), 1e-5f}, x.part(0, 24)), Contains("are not aligned"));
  CHECK_THROWS_WITH(maths->swiglu(x, x, View(x.data(), 8, DType::fp16)), Contains("cannot compute on a GPU in fp16"));
}

TEST_CASE("copies reach pinned memory of the host", "[gpu]") {
  const auto maths = gpu_maths(0);
  Place at(*maths, DType::fp32);
  const View from = at.floats(1000, 1), to = at.floats(1000, 2);
  const auto memory = maths->allocate(from.bytes(), true);
  const View middle(memory.get(), from.count(), DType::fp32);
  maths->copy(from, middle);
  maths->copy(middle, to);
  CHECK(at.read(to) == at.read(from));
  CHECK(std::ranges::equal(middle.as<float>(), at.read(from)));
}

TEST_CASE("a training on a GPU follows the one on the CPU, with the same bits on every tier", "[gpu]") {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    benchmarks::RunOptions run = tiny_run();
    run.model.dtype = dtype;
    run.steps = 6;
    const Outcome on_cpu = train_llama(run, 1);
    run.training.gpu = 0;
    const Outcome on_gpu = train_llama(run, 1);
    for (std::size_t step = 0; step < run.steps; ++step)
      CHECK(on_gpu.steps[step].first == Approx(on_cpu.steps[step].first).epsilon(dtype == DType::fp32 ? 1e-3 : 0.02));
    for (const Tier tier : {Tier::host, Tier::nvme}) {
      run.training.state = tier;
      CHECK(train_llama(run, 1) == on_gpu);
    }
  }
}
