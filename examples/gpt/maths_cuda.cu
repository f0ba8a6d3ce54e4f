// The arithmetic on GPUs: products by cuBLAS, and kernels, which take plain structs only. nvcc does not compile fmt::format().
#include <cublas_v2.h>

#include <cmath>

#include "examples/gpt/layer_math.h"
#include "examples/gpt/maths.h"
#include "kernels/cuda_launch.cuh"
#include "kernels/number_math.h"
#include "kernels/runtime/stream.h"

namespace ballast::gpt {
namespace {

using kernels::ConstNumbers;
using kernels::each_chunk;
using kernels::launch;
using kernels::Numbers;

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
          [&] { return Problem{.what = std::string(what) + " failed: " + cublasGetStatusString(status)}; });
}

cudaDataType type_of(DType dtype) { return dtype == DType::fp32 ? CUDA_R_32F : CUDA_R_16BF; }

cublasOperation_t direction(const ConstMatrix& matrix) { return matrix.transposed ? CUBLAS_OP_T : CUBLAS_OP_N; }

int whole(std::size_t count) {
  require(count <= INT32_MAX, Code::wrong_size, [&] {
    return Problem{.what = "cannot multiply with cuBLAS: a matrix is too large",
                   .needed = std::to_string(count) + " rows or columns",
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
    const auto number = [&](int unit) { return std::to_string(version / unit % 100); };
    return "cuBLAS " + number(10000) + "." + number(100) + "." + number(1);
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

// --- Kernels ---

constexpr unsigned threads = kernels::threads_per_chunk;

__device__ float get(const ConstNumbers& from, std::size_t i) {
  if (from.dtype == DType::fp32) return reinterpret_cast<const float*>(from.data)[i];
  return kernels::from_bf16(std::uint32_t{reinterpret_cast<const std::uint16_t*>(from.data)[i]});
}

__device__ void set(const Numbers& to, std::size_t i, float value) {
  if (to.dtype == DType::fp32) {
    reinterpret_cast<float*>(to.data)[i] = value;
  } else {
    reinterpret_cast<std::uint16_t*>(to.data)[i] = static_cast<std::uint16_t>(kernels::to_bf16(value));
  }
}

__device__ ConstNumbers readable(const Numbers& numbers) { return {numbers.data, numbers.count, numbers.dtype}; }

__device__ void add(const Numbers& to, std::size_t i, float more) { set(to, i, get(readable(to), i) + more); }

struct Add {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Max {
  __device__ float operator()(float a, float b) const { return a > b ? a : b; }
};

// Joins the values of the block's threads in a fixed order. All threads get the result.
template <class Join>
__device__ float join_block(float mine, Join join) {
  __shared__ float all[threads];
  __syncthreads();
  all[threadIdx.x] = mine;
  for (unsigned width = threads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) all[threadIdx.x] = join(all[threadIdx.x], all[threadIdx.x + width]);
  }
  __syncthreads();
  return all[0];
}

template <class Term>
__device__ float sum_of(std::size_t count, Term term) {
  float sum = 0;
  for (std::size_t i = threadIdx.x; i < count; i += threads)
    sum += term(i);
  return join_block(sum, Add());
}

// Calls body(i) for each element of an array; neighbouring threads take neighbouring elements.
template <class Body>
__device__ void each_element(std::size_t count, Body body) {
  each_chunk((count + threads - 1) / threads, [&](std::size_t chunk) {
    const std::size_t i = chunk * threads + threadIdx.x;
    if (i < count) body(i);
  });
}

std::size_t blocks_of(std::size_t elements) { return (elements + threads - 1) / threads; }

__global__ void begin_rows_kernel(ConstNumbers bias, Numbers to, bool add_to_it) {
  each_element(to.count, [&](std::size_t i) {
    const float more = get(bias, i % bias.count);
    add_to_it ? add(to, i, more) : set(to, i, more);
  });
}

// A block sums 32 columns, with eight threads for each column that take the rows in turn.
constexpr unsigned columns = 32;
constexpr unsigned per_column = threads / columns;

std::size_t blocks_of_columns(std::size_t count) { return (count + columns - 1) / columns; }

template <class Term>
__device__ void sum_columns(std::size_t rows, const Numbers& into, Term term) {
  __shared__ float sums[per_column][columns];
  each_chunk((into.count + columns - 1) / columns, [&](std::size_t chunk) {
    const unsigned lane = threadIdx.x % columns, turn = threadIdx.x / columns;
    const std::size_t column = chunk * columns + lane;
    float sum = 0;
    for (std::size_t row = turn; row < rows && column < into.count; row += per_column)
      sum += term(row, column);
    __syncthreads();
    sums[turn][lane] = sum;
    __syncthreads();
    if (turn > 0 || column >= into.count) return;
    for (unsigned i = 1; i < per_column; ++i)
      sum += sums[i][lane];
    add(into, column, sum);
  });
}

__global__ void add_rows_kernel(ConstNumbers rows, Numbers into) {
  sum_columns(rows.count / into.count, into,
              [&](std::size_t row, std::size_t column) { return get(rows, row * into.count + column); });
}

__device__ float gate_of(float x) { return 1.0f / (1.0f + expf(gelu_exponent(x))); }

__global__ void gelu_kernel(ConstNumbers x, Numbers to) {
  each_element(to.count, [&](std::size_t i) { set(to, i, get(x, i) * gate_of(get(x, i))); });
}

__global__ void gelu_backward_kernel(ConstNumbers x, Numbers gradient) {
  each_element(gradient.count, [&](std::size_t i) {
    set(gradient, i, get(readable(gradient), i) * gelu_slope(get(x, i), gate_of(get(x, i))));
  });
}

// The norm of rows, and the memory for their moments.
struct Norm {
  ConstNumbers x;
  ConstNumbers weight;
  ConstNumbers bias;
  float* moments;  // two for each row
};

__global__ void moments_kernel(Norm norm) {
  const std::size_t width = norm.weight.count;
  const auto count = static_cast<float>(width);
  each_chunk(norm.x.count / width, [&](std::size_t row) {
    const std::size_t first = row * width;
    const float mean = sum_of(width, [&](std::size_t i) { return get(norm.x, first + i); }) / count;
    const float squares = sum_of(width, [&](std::size_t i) {
      const float off = get(norm.x, first + i) - mean;
      return off * off;
    });
    if (threadIdx.x > 0) return;
    norm.moments[2 * row] = mean;
    norm.moments[2 * row + 1] = 1.0f / sqrtf(squares / count + norm_epsilon);
  });
}

__device__ float normal(const Norm& norm, std::size_t row, std::size_t column) {
  return (get(norm.x, row * norm.weight.count + column) - norm.moments[2 * row]) * norm.moments[2 * row + 1];
}

__global__ void normalise_kernel(Norm norm, Numbers to) {
  const std::size_t width = norm.weight.count;
  each_element(to.count, [&](std::size_t i) {
    set(to, i, normal(norm, i / width, i % width) * get(norm.weight, i % width) + get(norm.bias, i % width));
  });
}

__global__ void normalise_backward_kernel(Norm norm, ConstNumbers gradient, Numbers into) {
  const std::size_t width = norm.weight.count;
  const auto count = static_cast<float>(width);
  each_chunk(norm.x.count / width, [&](std::size_t row) {
    const auto slope = [&](std::size_t i) { return get(gradient, row * width + i) * get(norm.weight, i); };
    const float share = sum_of(width, slope) / count;
    const float along = sum_of(width, [&](std::size_t i) { return slope(i) * normal(norm, row, i); }) / count;
    for (std::size_t i = threadIdx.x; i < width; i += threads)
      add(into, row * width + i, norm.moments[2 * row + 1] * (slope(i) - share - normal(norm, row, i) * along));
  });
}

__global__ void norm_weight_kernel(Norm norm, ConstNumbers gradient, Numbers into) {
  sum_columns(gradient.count / into.count, into, [&](std::size_t row, std::size_t column) {
    return get(gradient, row * into.count + column) * normal(norm, row, column);
  });
}

// Replaces a row by its exponentials; returns their sum.
__device__ float exponentiate(float* row, std::size_t count, float scale) {
  float most = row[0];
  for (std::size_t i = threadIdx.x; i < count; i += threads)
    most = Max()(most, row[i]);
  most = join_block(most, Max());
  for (std::size_t i = threadIdx.x; i < count; i += threads)
    row[i] = expf(scale * (row[i] - most));
  return sum_of(count, [&](std::size_t i) { return row[i]; });
}

// Scores of heads, each a matrix of context x context. A kernel replaces them by softmaxes up to the diagonal and zeros after it, in
// place and in `weights`.
struct Scores {
  float* scores;
  std::size_t heads;
  std::size_t context;
  float scale;
};

__global__ void causal_softmax_kernel(Scores s, Numbers weights) {
  each_chunk(s.heads * s.context, [&](std::size_t row) {
    float* const numbers = s.scores + row * s.context;
    const std::size_t seen = row % s.context + 1;
    const float factor = 1.0f / exponentiate(numbers, seen, s.scale);
    for (std::size_t i = threadIdx.x; i < s.context; i += threads) {
      numbers[i] = i < seen ? numbers[i] * factor : 0.0f;
      set(weights, row * s.context + i, numbers[i]);
    }
  });
}

__global__ void causal_softmax_backward_kernel(Scores s, const float* slopes, Numbers weights) {
  each_chunk(s.heads * s.context, [&](std::size_t row) {
    const float* const p = s.scores + row * s.context;
    const float* const slope = slopes + row * s.context;
    const float along = sum_of(row % s.context + 1, [&](std::size_t i) { return p[i] * slope[i]; });
    for (std::size_t i = threadIdx.x; i < s.context; i += threads)
      set(weights, row * s.context + i, s.scale * p[i] * (slope[i] - along));
  });
}

struct Text {
  const std::uint8_t* bytes;
  std::size_t count;
  std::size_t width;    // the width of a row of a table
  std::size_t context;  // rows of the table of positions
};

__global__ void embed_kernel(Text text, ConstNumbers tokens, ConstNumbers positions, Numbers to) {
  each_element(to.count, [&](std::size_t i) {
    const std::size_t at = i / text.width, column = i % text.width;
    const float token = get(tokens, text.bytes[at] * text.width + column);
    set(to, i, token + get(positions, at % text.context * text.width + column));
  });
}

// Each value of a table looks at all positions, in order, so that no two threads write the same value.
__global__ void embed_tokens_kernel(Text text, ConstNumbers gradient, Numbers tokens) {
  each_element(tokens.count, [&](std::size_t i) {
    float sum = 0;
    for (std::size_t at = 0; at < text.count; ++at) {
      if (text.bytes[at] == i / text.width) sum += get(gradient, at * text.width + i % text.width);
    }
    add(tokens, i, sum);
  });
}

__global__ void embed_positions_kernel(Text text, ConstNumbers gradient, Numbers positions) {
  each_element(positions.count, [&](std::size_t i) {
    float sum = 0;
    for (std::size_t at = i / text.width; at < text.count; at += text.context)
      sum += get(gradient, at * text.width + i % text.width);
    add(positions, i, sum);
  });
}

// `text` holds the targets; its width is that of the logits.
__global__ void cross_entropy_kernel(Text text, const float* logits, float* losses, Numbers gradient) {
  each_chunk(text.count, [&](std::size_t row) {
    const float* const x = logits + row * text.width;
    float most = x[0];
    for (std::size_t i = threadIdx.x; i < text.width; i += threads)
      most = Max()(most, x[i]);
    most = join_block(most, Max());
    const float total = sum_of(text.width, [&](std::size_t i) { return expf(x[i] - most); });
    const float share = 1.0f / static_cast<float>(text.count);
    for (std::size_t i = threadIdx.x; i < text.width; i += threads)
      set(gradient, row * text.width + i, share * (expf(x[i] - most) / total - (i == text.bytes[row] ? 1.0f : 0.0f)));
    if (threadIdx.x == 0) losses[row] = logf(total) - (x[text.bytes[row]] - most);
  });
}

// --- Layers ---

ConstNumbers numbers(const ConstView& view) { return {view.data(), view.count(), view.dtype()}; }
Numbers numbers(const View& view) { return {view.data(), view.count(), view.dtype()}; }

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
    if (product.bias.count() > 0) {
      launch<begin_rows_kernel>(cuda_, "launching biases", blocks_of(product.to.memory.count()), numbers(product.bias),
                                numbers(product.to.memory), product.add);
    }
    Product onto_bias = product;
    onto_bias.add = product.add || product.bias.count() > 0;
    multiply_(onto_bias);
  }

  void add_rows(const ConstMatrix& rows, const View& into) override {
    sum_rows("launching sums of rows", rows.memory, into);
  }

  void clear(const View& to) override { fill(to.data(), 0, to.bytes(), stream_); }

  void copy(const ConstView& from, const View& to) override {
    ballast::copy(to.data(), from.data(), from.bytes(), stream_);
  }

  void gelu(const ConstView& x, const View& to) override {
    launch<gelu_kernel>(cuda_, "launching gelu", blocks_of(to.count()), numbers(x), numbers(to));
  }

  void gelu_backward(const ConstView& x, const View& gradient) override {
    launch<gelu_backward_kernel>(cuda_, "launching gelu's slopes", blocks_of(gradient.count()), numbers(x),
                                 numbers(gradient));
  }

  void layer_norm(const ConstView& x, const LayerNorm& norm, const View& to) override {
    launch<normalise_kernel>(cuda_, "launching a norm", blocks_of(to.count()), with_moments(x, norm), numbers(to));
  }

  void layer_norm_backward(const ConstView& x, const LayerNorm& norm, const ConstView& gradient,
                           const LayerNormGradients& into) override {
    const Norm of = with_moments(x, norm);
    const std::size_t width = of.weight.count;
    launch<normalise_backward_kernel>(cuda_, "launching a norm's slopes", of.x.count / width, of, numbers(gradient),
                                      numbers(into.input));
    launch<norm_weight_kernel>(cuda_, "launching a norm's weight", blocks_of_columns(width), of, numbers(gradient),
                               numbers(into.weight));
    sum_rows("launching a norm's bias", gradient, into.bias);
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
      launch<causal_softmax_backward_kernel>(cuda_, "launching softmaxes' slopes", shape.heads * shape.context,
                                             heads.kernel, floats(heads.slopes.memory), numbers(heads.weights.memory));
      multiply_({.a = weights, .b = first.key, .to = to.query}, {shape.heads, step, width, width});
      multiply_({.a = transposed(weights), .b = first.query, .to = to.key}, {shape.heads, step, width, width});
    }
  }

  void embed(const ConstView& bytes, const Tables<ConstView>& tables, const View& to) override {
    launch<embed_kernel>(cuda_, "launching an embedding", blocks_of(to.count()),
                         text_of(bytes, to.count(), tables.positions.count()), numbers(tables.tokens),
                         numbers(tables.positions), numbers(to));
  }

  void embed_backward(const ConstView& bytes, const ConstView& gradient, const Tables<View>& into) override {
    const Text text = text_of(bytes, gradient.count(), into.positions.count());
    launch<embed_tokens_kernel>(cuda_, "launching a table's slopes", blocks_of(into.tokens.count()), text,
                                numbers(gradient), numbers(into.tokens));
    launch<embed_positions_kernel>(cuda_, "launching a table's slopes", blocks_of(into.positions.count()), text,
                                   numbers(gradient), numbers(into.positions));
  }

  void cross_entropy(const ConstView& logits, const Targets& targets) override {
    launch<cross_entropy_kernel>(cuda_, "launching cross entropies", targets.bytes.count(),
                                 text_of(targets.bytes, logits.count(), 0), logits.as<float>().data(),
                                 floats(targets.losses), numbers(targets.gradient));
  }

  // The first product makes CUDA load cuBLAS, which may synchronize the GPU. Later, beside a collective of NCCL, that could be a
  // deadlock between ranks.
  void load_products() {
    constexpr std::size_t side = 16, all = side * side;
    const View memory(scratch(3 * all * byte_size(DType::bf16)).data(), 3 * all, DType::bf16);
    clear(memory);
    multiply({.a = readable(matrix(memory.part(0, all), side)),
              .b = readable(matrix(memory.part(all, all), side)),
              .to = matrix(memory.part(2 * all, all), side)});
    finish();
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
    Scores kernel{};
    std::size_t step = 0;
  };

  void weigh(const Heads& heads, const HeadOf<ConstMatrix>& first) {
    const std::size_t width = first.query.columns;
    multiply_({.a = first.query, .b = transposed(first.key), .to = heads.scores},
              {heads.kernel.heads, width, width, heads.step});
    launch<causal_softmax_kernel>(cuda_, "launching softmaxes", heads.kernel.heads * heads.kernel.context, heads.kernel,
                                  numbers(heads.weights.memory));
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

  Norm with_moments(const ConstView& x, const LayerNorm& norm) {
    const std::size_t rows = x.count() / norm.weight.count();
    const Norm of{numbers(x), numbers(norm.weight), numbers(norm.bias), floats(scratch(rows * 2 * sizeof(float)))};
    launch<moments_kernel>(cuda_, "launching moments", rows, of);
    return of;
  }

  void sum_rows(std::string_view what, const ConstView& rows, const View& into) {
    launch<add_rows_kernel>(cuda_, what, blocks_of_columns(into.count()), numbers(rows), numbers(into));
  }

  static Text text_of(const ConstView& bytes, std::size_t elements, std::size_t positions) {
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

std::unique_ptr<Maths> gpu_maths(StreamHandle stream, int gpu) {
  auto maths = std::make_unique<GpuMaths>(stream, gpu);
  maths->load_products();
  return maths;
}

}  // namespace ballast::gpt
