#include <cublas_v2.h>
#include <fmt/format.h>

#include <cmath>

#include "examples/gpt/layers_cuda.h"
#include "examples/gpt/maths.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/stream.h"

namespace ballast::gpt {
namespace {

// --- Products of matrices ---

// The distance between the matrices of several products of one shape, in elements.
struct Steps {
  std::size_t count = 1;
  std::size_t a = 0;
  std::size_t b = 0;
  std::size_t to = 0;
};

void check(cublasStatus_t status, std::string_view what) {
  require(status == CUBLAS_STATUS_SUCCESS, Code::cuda_call,
          [&] { return Problem{.what = fmt::format("{} failed: {}", what, cublasGetStatusString(status))}; });
}

cudaDataType type_of(DType dtype) { return dtype == DType::fp32 ? CUDA_R_32F : CUDA_R_16BF; }

cublasOperation_t direction(const ConstMatrix& matrix) { return matrix.transposed ? CUBLAS_OP_T : CUBLAS_OP_N; }

int whole(std::size_t count) {
  require(count <= INT32_MAX, Code::wrong_size, [&] {
    return Problem{.what = "cannot multiply with cuBLAS: a matrix is too large",
                   .needed = fmt::format("{} rows or columns", count),
                   .available = std::to_string(INT32_MAX)};
  });
  return static_cast<int>(count);
}

long long step(std::size_t elements) { return static_cast<long long>(elements); }

// Work goes into the stream, which outlives it. It ignores the bias of a product.
class CublasMultiplier {
 public:
  CublasMultiplier(StreamHandle stream, int gpu) : handle_(nullptr, {gpu}) {
    device::require_gpu(gpu);
    const CurrentGpu current(gpu);
    cublasHandle_t handle = nullptr;
    check(cublasCreate(&handle), "starting cuBLAS");
    handle_.reset(handle);
    check(cublasSetStream(handle, stream), "giving cuBLAS a stream");
  }

  std::string library() const {
    int version = 0;
    check(cublasGetVersion(handle_.get(), &version), "asking for cuBLAS's version");
    return fmt::format("cuBLAS {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
  }

  // Views are those of the first product. cuBLAS stores matrices by columns. Ours are by rows, so they are its transposes: it
  // computes to^T = b^T a^T.
  void operator()(const Product& product, const Steps& steps = {}) const {
    const auto& [a, b, to, bias, add] = product;
    const CurrentGpu current(handle_.get_deleter().gpu);
    const float one = 1.0f, begin = add ? 1.0f : 0.0f;
    check(cublasGemmStridedBatchedEx(handle_.get(), direction(b), direction(a), whole(to.columns), whole(to.rows),
                                     whole(a.columns), &one, b.data(), type_of(b.dtype()), whole(b.stride),
                                     step(steps.b), a.data(), type_of(a.dtype()), whole(a.stride), step(steps.a),
                                     &begin, to.data(), type_of(to.dtype()), whole(to.stride), step(steps.to),
                                     whole(steps.count), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
          "a product of matrices by cuBLAS");
  }

 private:
  struct Destroy {
    int gpu;
    void operator()(cublasHandle_t handle) const {
      const CurrentGpu current(gpu, std::nothrow);
      cublasDestroy(handle);
    }
  };
  std::unique_ptr<std::remove_pointer_t<cublasHandle_t>, Destroy> handle_;
};

// --- Layers ---

kernels::ConstNumbers numbers(const ConstView& view) { return {view.data(), view.count(), view.dtype()}; }
kernels::Numbers numbers(const View& view) { return {view.data(), view.count(), view.dtype()}; }

class GpuMaths : public Maths {
 public:
  GpuMaths(StreamHandle stream, int gpu)
      : multiply_(stream, gpu), stream_(Stream::wrap(stream, gpu)), cuda_(kernels::cuda_on(stream, gpu)) {}

  std::string library() const override { return multiply_.library(); }
  MemoryKind memory() const override { return MemoryKind::device; }
  int gpu() const override { return cuda_.gpu; }

  void multiply(const Product& product) override {
    require(product.bias.count() == 0 || product.to.stride == product.bias.count(), Code::unsupported, [] {
      return Problem{.what = "cannot add a bias to rows with gaps between them", .needed = "contiguous rows"};
    });
    cuda::begin_rows(cuda_, numbers(product.bias), numbers(product.to.memory), product.add);
    Product onto_bias = product;
    onto_bias.add = product.add || product.bias.count() > 0;
    multiply_(onto_bias);
  }

  void add_rows(const ConstMatrix& rows, const View& into) override {
    cuda::add_rows(cuda_, numbers(rows.memory), numbers(into));
  }

  void clear(const View& to) override { fill(to.data(), 0, to.bytes(), stream_); }

  void copy(const ConstView& from, const View& to) override {
    ballast::copy(to.data(), from.data(), from.bytes(), stream_);
  }

  void gelu(const ConstView& x, const View& to) override { cuda::gelu(cuda_, numbers(x), numbers(to)); }

  void gelu_backward(const ConstView& x, const View& gradient) override {
    cuda::gelu_backward(cuda_, numbers(x), numbers(gradient));
  }

  void layer_norm(const ConstView& x, const LayerNorm& norm, const View& to) override {
    cuda::layer_norm(cuda_, norm_of(x, norm), numbers(to));
  }

  void layer_norm_backward(const ConstView& x, const LayerNorm& norm, const ConstView& gradient,
                           const LayerNormGradients& into) override {
    cuda::layer_norm_backward(cuda_, norm_of(x, norm), numbers(gradient),
                              {numbers(into.input), numbers(into.weight), numbers(into.bias)});
  }

  void attention(const AttentionShape& shape, const ConstView& qkv, const View& to) override {
    const Heads heads = heads_of(shape, qkv.dtype());
    for (std::size_t sequence = 0; sequence < shape.batch; ++sequence) {
      const HeadOf<ConstMatrix> first = head_of(shape, qkv, sequence * shape.heads);
      weigh(heads, first);
      multiply_(
          {.a = readable(heads.weights), .b = first.value, .to = output_of_head(shape, to, sequence * shape.heads)},
          {shape.heads, heads.step, shape.head_width, shape.head_width});
    }
  }

  void attention_backward(const AttentionShape& shape, const ConstView& qkv, const ConstView& gradient,
                          const View& qkv_gradient) override {
    const Heads heads = heads_of(shape, qkv.dtype());
    const ConstMatrix weights = readable(heads.weights);
    const std::size_t width = shape.head_width, step = heads.step;
    for (std::size_t sequence = 0; sequence < shape.batch; ++sequence) {
      const HeadOf<ConstMatrix> first = head_of(shape, qkv, sequence * shape.heads);
      const HeadOf<Matrix> to = head_of(shape, qkv_gradient, sequence * shape.heads);
      const ConstMatrix output = output_of_head(shape, gradient, sequence * shape.heads);
      weigh(heads, first);
      multiply_({.a = transposed(weights), .b = output, .to = to.value}, {shape.heads, step, width, width});
      multiply_({.a = output, .b = transposed(first.value), .to = heads.slopes}, {shape.heads, width, width, step});
      cuda::causal_softmax_backward(cuda_, heads.kernel, floats(heads.slopes.memory), numbers(heads.weights.memory));
      multiply_({.a = weights, .b = first.key, .to = to.query}, {shape.heads, step, width, width});
      multiply_({.a = transposed(weights), .b = first.query, .to = to.key}, {shape.heads, step, width, width});
    }
  }

  void embed(const ConstView& bytes, const Tables<ConstView>& tables, const View& to) override {
    cuda::embed(cuda_, text_of(bytes, to.count(), tables.positions.count()), numbers(tables.tokens),
                numbers(tables.positions), numbers(to));
  }

  void embed_backward(const ConstView& bytes, const ConstView& gradient, const Tables<View>& into) override {
    cuda::embed_backward(cuda_, text_of(bytes, gradient.count(), into.positions.count()), numbers(gradient),
                         numbers(into.tokens), numbers(into.positions));
  }

  void cross_entropy(const ConstView& logits, const Targets& targets) override {
    cuda::cross_entropy(cuda_, text_of(targets.bytes, logits.count(), 0), logits.as<float>().data(),
                        floats(targets.losses), numbers(targets.gradient));
  }

  void upload(std::span<const std::byte> from, const View& to) override {
    ballast::copy(to.data(), from.data(), from.size(), stream_);
  }

  void download(const ConstView& from, std::span<std::byte> to) override {
    ballast::copy(to.data(), from.data(), to.size(), stream_);
    finish();
  }

  void finish() override { stream_.synchronize(); }

 private:
  // The matrices of the heads of one sequence, each of context x context, one after the other.
  struct Heads {
    Matrix scores{}, slopes{}, weights{};  // the first head's matrices
    cuda::Scores kernel{};
    std::size_t step = 0;
  };

  void weigh(const Heads& heads, const HeadOf<ConstMatrix>& first) {
    const std::size_t width = first.query.columns;
    multiply_({.a = first.query, .b = transposed(first.key), .to = heads.scores},
              {heads.kernel.heads, width, width, heads.step});
    cuda::causal_softmax(cuda_, heads.kernel, numbers(heads.weights.memory));
  }

  Heads heads_of(const AttentionShape& shape, DType dtype) {
    const std::size_t step = shape.context * shape.context, count = shape.heads * step;
    std::byte* const begin = scratch(count * (2 * sizeof(float) + byte_size(dtype))).data();
    const View scores(begin, count, DType::fp32), slopes(begin + scores.bytes(), count, DType::fp32);
    const View weights(begin + 2 * scores.bytes(), count, dtype);
    const float scale = 1.0f / std::sqrt(static_cast<float>(shape.head_width));
    const auto first_step = [&](const View& all) { return Matrix{all, shape.context, shape.context, shape.context}; };
    return {first_step(scores),
            first_step(slopes),
            first_step(weights),
            {floats(scores), shape.heads, shape.context, scale},
            step};
  }

  cuda::Norm norm_of(const ConstView& x, const LayerNorm& norm) {
    const std::size_t rows = x.count() / norm.weight.count();
    return {numbers(x), numbers(norm.weight), numbers(norm.bias), floats(scratch(rows * 2 * sizeof(float)))};
  }

  static cuda::Text text_of(const ConstView& bytes, std::size_t elements, std::size_t positions) {
    const std::size_t width = elements / bytes.count();
    return {bytes.as<std::uint8_t>().data(), bytes.count(), width, positions / width};
  }

  static float* floats(const View& view) { return reinterpret_cast<float*>(view.data()); }

  // Returns scratch memory, which stays valid until the next call.
  View scratch(std::size_t bytes) {
    if (scratch_.bytes() < bytes) {
      scratch_ = {};
      scratch_ = allocate(
          accounts_, {.kind = MemoryKind::device, .bytes = bytes, .owner = "layers at work", .gpu = stream_.gpu()});
    }
    return scratch_.view(DType::u8);
  }

  CublasMultiplier multiply_;
  Stream stream_;
  kernels::Cuda cuda_;
  MemoryAccounts accounts_;
  Buffer scratch_{};
};

}  // namespace

std::unique_ptr<Maths> gpu_maths(StreamHandle stream, int gpu) { return std::make_unique<GpuMaths>(stream, gpu); }

}  // namespace ballast::gpt
