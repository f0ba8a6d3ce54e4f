#include "examples/gpt/layer_math.h"
#include "examples/gpt/layers_cuda.h"
#include "kernels/cuda_launch.cuh"
#include "kernels/number_math.h"

namespace ballast::gpt::cuda {
namespace {

using kernels::each_chunk;
using kernels::launch;

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

}  // namespace

void begin_rows(const Cuda& cuda, const ConstNumbers& bias, const Numbers& to, bool add) {
  if (bias.count > 0) launch<begin_rows_kernel>(cuda, "launching biases", blocks_of(to.count), bias, to, add);
}

void add_rows(const Cuda& cuda, const ConstNumbers& rows, const Numbers& into) {
  launch<add_rows_kernel>(cuda, "launching sums of rows", (into.count + columns - 1) / columns, rows, into);
}

void gelu(const Cuda& cuda, const ConstNumbers& x, const Numbers& to) {
  launch<gelu_kernel>(cuda, "launching gelu", blocks_of(to.count), x, to);
}

void gelu_backward(const Cuda& cuda, const ConstNumbers& x, const Numbers& gradient) {
  launch<gelu_backward_kernel>(cuda, "launching gelu's slopes", blocks_of(gradient.count), x, gradient);
}

void layer_norm(const Cuda& cuda, const Norm& norm, const Numbers& to) {
  launch<moments_kernel>(cuda, "launching moments", norm.x.count / norm.weight.count, norm);
  launch<normalise_kernel>(cuda, "launching a norm", blocks_of(to.count), norm, to);
}

void layer_norm_backward(const Cuda& cuda, const Norm& norm, const ConstNumbers& gradient, const NormGradients& into) {
  const std::size_t width = norm.weight.count, blocks = (width + columns - 1) / columns;
  launch<moments_kernel>(cuda, "launching moments", norm.x.count / width, norm);
  launch<normalise_backward_kernel>(cuda, "launching a norm's slopes", norm.x.count / width, norm, gradient, into.x);
  launch<norm_weight_kernel>(cuda, "launching a norm's weight", blocks, norm, gradient, into.weight);
  launch<add_rows_kernel>(cuda, "launching a norm's bias", blocks, gradient, into.bias);
}

void causal_softmax(const Cuda& cuda, const Scores& scores, const Numbers& weights) {
  launch<causal_softmax_kernel>(cuda, "launching softmaxes", scores.heads * scores.context, scores, weights);
}

void causal_softmax_backward(const Cuda& cuda, const Scores& softmax, const float* slopes, const Numbers& weights) {
  launch<causal_softmax_backward_kernel>(cuda, "launching softmaxes' slopes", softmax.heads * softmax.context, softmax,
                                         slopes, weights);
}

void embed(const Cuda& cuda, const Text& text, const ConstNumbers& tokens, const ConstNumbers& positions,
           const Numbers& to) {
  launch<embed_kernel>(cuda, "launching an embedding", blocks_of(to.count), text, tokens, positions, to);
}

void embed_backward(const Cuda& cuda, const Text& text, const ConstNumbers& gradient, const Numbers& tokens,
                    const Numbers& positions) {
  launch<embed_tokens_kernel>(cuda, "launching a table's slopes", blocks_of(tokens.count), text, gradient, tokens);
  launch<embed_positions_kernel>(cuda, "launching a table's slopes", blocks_of(positions.count), text, gradient,
                                 positions);
}

void cross_entropy(const Cuda& cuda, const Text& text, const float* logits, float* losses, const Numbers& gradient) {
  launch<cross_entropy_kernel>(cuda, "launching cross entropies", text.count, text, logits, losses, gradient);
}

}  // namespace ballast::gpt::cuda
