// Compares the layers on a GPU with those on the CPU, and a training on each.
#include "examples/gpt/number.h"
#include "kernels/runtime/stream.h"
#include "tests/gpt/differences.h"
#include "tests/gpt/training_rig.h"

using namespace ballast;
using namespace ballast::gpt;
using namespace ballast::testing;

namespace {

// Arguments and results of a layer, in memory where one kind of maths works.
class Place {
 public:
  Place(Maths& maths, DType dtype) : maths_(maths), dtype_(dtype) {}

  View numbers(std::size_t count, std::uint64_t seed) { return put(random_floats(count, seed), dtype_); }
  View floats(std::size_t count) { return put(Floats(count), DType::fp32); }
  View bytes(std::size_t count, unsigned below) {
    const View to = reserve(count, DType::u8);
    std::vector<std::uint8_t> made(count);
    for (std::size_t i = 0; i < count; ++i) {
      made[i] = static_cast<std::uint8_t>(noise({7, i}) % below);
    }
    maths_.upload(std::as_bytes(std::span(made)), to);
    maths_.finish();
    return to;
  }

  Floats read(const View& from) {
    std::vector<std::byte> bytes(from.bytes());
    maths_.download(from, bytes);
    Floats to(from.count());
    for (std::size_t i = 0; i < to.size(); ++i) {
      to[i] = number(ConstView(bytes.data(), from.count(), from.dtype()), i);
    }
    return to;
  }

  Maths& maths() { return maths_; }

 private:
  View reserve(std::size_t count, DType dtype) {
    buffers_.push_back(
        allocate(accounts_,
                 {.kind = maths_.memory(), .bytes = count * byte_size(dtype), .owner = "a test", .gpu = maths_.gpu()}));
    return buffers_.back().view(dtype);
  }

  View put(const Floats& from, DType dtype) {
    const View to = reserve(from.size(), dtype);
    std::vector<std::byte> bytes(to.bytes());
    for (std::size_t i = 0; i < from.size(); ++i) {
      set_number(View(bytes.data(), to.count(), dtype), i, from[i]);
    }
    maths_.upload(bytes, to);
    maths_.finish();
    return to;
  }

  Maths& maths_;
  DType dtype_;
  MemoryAccounts accounts_;
  std::vector<Buffer> buffers_;
};

using Layer = std::function<std::vector<View>(Place&)>;  // returns its results

struct NamedLayer {
  std::string name;
  Layer layer;
};

constexpr std::size_t width = 96, context = 70, batch = 2, positions = batch * context;
constexpr AttentionShape heads{.batch = batch, .context = context, .heads = 3, .head_width = 32};

std::vector<NamedLayer> products() {
  const auto product = [](bool a_turned, bool b_turned, bool add, bool bias) {
    return [=](Place& at) -> std::vector<View> {
      const View a = at.numbers(positions * width, 1), b = at.numbers(width * 64, 2),
                 to = at.numbers(positions * 64, 3);
      at.maths().multiply({.a = a_turned ? transposed(ConstView(a), positions) : matrix(ConstView(a), width),
                           .b = b_turned ? transposed(ConstView(b), width) : matrix(ConstView(b), 64),
                           .to = matrix(to, 64),
                           .bias = bias ? ConstView(at.numbers(64, 4)) : ConstView(),
                           .add = add});
      return {to};
    };
  };
  return {{"a b", product(false, false, false, false)},
          {"a b^T + bias", product(false, true, false, true)},
          {"+= a^T b", product(true, false, true, false)},
          {"+= a b^T + bias", product(false, true, true, true)}};
}

std::vector<NamedLayer> layers() {
  using Views = std::vector<View>;
  return {{"sums of rows",
           [](Place& at) -> Views {
             const View to = at.numbers(width, 1);
             at.maths().add_rows(matrix(ConstView(at.numbers(positions * width, 2)), width), to);
             return {to};
           }},
          {"gelu",
           [](Place& at) -> Views {
             const View x = at.numbers(positions * width, 1), y = at.numbers(positions * width, 2);
             const View slopes = at.numbers(positions * width, 3);
             at.maths().gelu(x, y);
             at.maths().gelu_backward(x, slopes);
             return {y, slopes};
           }},
          {"layer norm",
           [](Place& at) -> Views {
             const View x = at.numbers(positions * width, 1), y = at.numbers(positions * width, 2);
             const LayerNorm norm{at.numbers(width, 3), at.numbers(width, 4)};
             const View of_x = at.numbers(x.count(), 6), of_weight = at.numbers(width, 7),
                        of_bias = at.numbers(width, 8);
             at.maths().layer_norm(x, norm, y);
             at.maths().layer_norm_backward(x, norm, at.numbers(x.count(), 5), {of_weight, of_bias, of_x});
             return {y, of_x, of_weight, of_bias};
           }},
          {"attention",
           [](Place& at) -> Views {
             const View qkv = at.numbers(positions * 3 * width, 1), y = at.numbers(positions * width, 2);
             const View slopes = at.numbers(qkv.count(), 3);
             at.maths().attention(heads, qkv, y);
             at.maths().attention_backward(heads, qkv, at.numbers(y.count(), 4), slopes);
             return {y, slopes};
           }},
          {"embedding",
           [](Place& at) -> Views {
             const View bytes = at.bytes(positions, 256), y = at.numbers(positions * width, 1);
             const View tokens = at.numbers(256 * width, 2), places = at.numbers(context * width, 3);
             at.maths().embed(bytes, {tokens, places}, y);
             at.maths().embed_backward(bytes, at.numbers(y.count(), 4), {tokens, places});
             return {y, tokens, places};
           }},
          {"cross entropy", [](Place& at) -> Views {
             const View logits = at.floats(positions * 256), losses = at.floats(positions);
             const View slopes = at.numbers(logits.count(), 1);
             at.maths().multiply({.a = matrix(ConstView(at.numbers(positions * width, 2)), width),
                                  .b = matrix(ConstView(at.numbers(width * 256, 3)), 256),
                                  .to = matrix(logits, 256)});
             at.maths().cross_entropy(logits, {at.bytes(positions, 256), losses, slopes});
             return {losses, slopes};
           }}};
}

// Checks that results are near: a GPU's sums have another order, and in bf16 a sum that rounds differently changes
// later results.
void check_near(const Floats& found, const Floats& expected, DType dtype) {
  REQUIRE(found.size() == expected.size());
  float largest = 0, worst = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    largest = std::max(largest, std::abs(expected[i]));
    worst = std::max(worst, std::abs(found[i] - expected[i]));
  }
  CHECK(largest > 0);
  CHECK(worst <= largest * (dtype == DType::fp32 ? 1e-4f : 0.03f));
}

}  // namespace

TEST_CASE("the layers on a GPU agree with those on the CPU", "[gpu]") {
  const Stream stream;
  const auto on_gpu = gpu_maths(stream.handle(), 0), on_cpu = cpu_maths(2);
  auto all = products();
  std::ranges::copy(layers(), std::back_inserter(all));
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    for (const auto& [name, layer] : all) {
      CAPTURE(name, ballast::name(dtype));
      Place gpu(*on_gpu, dtype), cpu(*on_cpu, dtype);
      const std::vector<View> found = layer(gpu), expected = layer(cpu);
      for (std::size_t i = 0; i < found.size(); ++i) {
        CAPTURE(i);
        check_near(gpu.read(found[i]), cpu.read(expected[i]), dtype);
      }
    }
  }
}

TEST_CASE("a training on a GPU follows the one on the CPU, with the same bits on every tier", "[gpu]") {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    RunOptions run = tiny_run();
    run.shape.dtype = dtype;
    run.steps = 10;
    const GptOutcome on_cpu = train_gpt(run, 1);
    run.training.gpu = 0;
    const GptOutcome on_gpu = train_gpt(run, 1);
    for (std::size_t step = 0; step < run.steps; ++step) {
      CHECK(on_gpu.steps[step].first == Approx(on_cpu.steps[step].first).epsilon(dtype == DType::fp32 ? 1e-3 : 0.02));
    }
    run.training.state = Tier::host;
    CHECK(train_gpt(run, 1) == on_gpu);
    run.training.state = Tier::nvme;
    CHECK(train_gpt(run, 1) == on_gpu);
  }
}
