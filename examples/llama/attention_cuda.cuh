// Causal attention without a matrix of all scores, as in FlashAttention: a block computes a tile of rows from one tile of columns
// after the other, and scores stay in registers. In bf16, tensor cores multiply.
#pragma once

#include <cmath>

#include "examples/llama/values_cuda.cuh"

namespace ballast::llama {
namespace {

constexpr unsigned warp_rows = 16;
constexpr unsigned attention_threads = 128;
constexpr unsigned tile_rows = attention_threads / warp * warp_rows;

// The rows of a head in one sequence.
template <class T>
struct HeadRows {
  T* first;
  std::size_t stride;
  unsigned count;
  unsigned width;

  __device__ T* at(unsigned row) const { return first + (row < count ? row : count - 1) * stride; }
};

// A tile of columns in shared memory. Two fit into 48 KiB. The last 16 bytes of a row shift the next one to other banks.
template <class T, unsigned width>
constexpr unsigned tile_columns = width * sizeof(T) <= 256   ? 64
                                  : width * sizeof(T) <= 512 ? 32
                                                             : 16;
template <class T, unsigned width>
using Tile = T[tile_columns<T, width>][width + 16 / sizeof(T)];

template <class T, unsigned columns, unsigned padded>
__device__ void load_tile(T (&tile)[columns][padded], const HeadRows<const T>& from, unsigned first) {
  constexpr unsigned at_once = 16 / sizeof(T), across = padded / at_once - 1;
  for (unsigned i = threadIdx.x; i < columns * across; i += attention_threads) {
    const unsigned row = i / across, column = i % across * at_once;
    const bool is_there = first + row < from.count && column < from.width;
    stored<at_once>(&tile[row][column]) =
        is_there ? stored<at_once>(from.at(first + row) + column) : Stored<T, at_once>{};
  }
}

// --- Products of a warp ---
//
// A warp holds 16 rows of 8 n columns as tensor cores do: with g = lane / 4 and t = lane % 4, values[i][j] is in row g + 8 (j / 2) and
// column 8 i + 2 t + j % 2.

__device__ unsigned lane_row() { return threadIdx.x % warp / 4; }
__device__ unsigned lane_column() { return threadIdx.x % 4 * 2; }

// Calls body(value, i, row, column) for the lane's values, of which each fourth is values[i / 4][i % 4], from a first row and column on.
template <unsigned n, class Body>
__device__ void each_value(float (&values)[n][4], unsigned row, unsigned column, Body body) {
#pragma unroll
  for (unsigned i = 0; i < 4 * n; ++i)
    body(values[i / 4][i % 4], i, row + lane_row() + i % 4 / 2 * 8, column + i / 4 * 8 + lane_column() + i % 2);
}

__device__ std::uint32_t join(const bf16* both) { return std::bit_cast<std::uint32_t>(stored<2>(both)); }
__device__ std::uint32_t join(const float* both) {
  const bf16 narrowed[2] = {narrow<bf16>(both[0]), narrow<bf16>(both[1])};
  return std::uint32_t{narrowed[1].bits} << 16 | narrowed[0].bits;
}

// sums += a b, of 16 x 16 and 16 x 8 values.
__device__ void multiply_tensors(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
#ifdef __CUDACC__
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  emulated::multiply_tensors(sums, a, b0, b1);
#endif
}

// Loads four 8 x 8 matrices for such a product, two for each group of columns. Lane l brings row l % 8 of matrix l / 8.
template <bool transposed>
__device__ void load_matrices(std::uint32_t (&to)[4], const bf16* row) {
#ifdef __CUDACC__
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  }
#else
  emulated::load_matrices(to, row, transposed);
#endif
}

// sums += a b^T, of the warp's rows of `a` and the rows of a tile.
template <unsigned n, unsigned m, unsigned padded>
__device__ void multiply_rows(float (&sums)[n][4], const HeadRows<const bf16>& a, unsigned row,
                              const bf16 (&b)[m][padded]) {
  const bf16* const low = a.at(row + lane_row()) + lane_column();
  const bf16* const high = a.at(row + lane_row() + 8) + lane_column();
  const unsigned lane = threadIdx.x % warp;
#pragma unroll
  for (unsigned k = 0; k < padded - 8; k += 16) {
    if (k >= a.width) break;
    const bool is_whole = k + 8 < a.width;
    const std::uint32_t x[4] = {join(low + k), join(high + k), is_whole ? join(low + k + 8) : 0,
                                is_whole ? join(high + k + 8) : 0};
#pragma unroll
    for (unsigned i = 0; i < n; i += 2) {
      std::uint32_t y[4];
      load_matrices<false>(y, &b[8 * i + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8]);
      multiply_tensors(sums[i], x, y[0], y[1]);
      multiply_tensors(sums[i + 1], x, y[2], y[3]);
    }
  }
}

template <unsigned n, unsigned m, unsigned padded>
__device__ void multiply_rows(float (&sums)[n][4], const HeadRows<const float>& a, unsigned row,
                              const float (&b)[m][padded]) {
  const float *const low = a.at(row + lane_row()), *const high = a.at(row + lane_row() + 8);
  for (unsigned k = 0; k < a.width; k += 4) {
    const Pack<4> x[2] = {load<4>(low + k), load<4>(high + k)};
    each_value(sums, 0, 0, [&](float& sum, unsigned i, unsigned, unsigned column) {
      const Pack<4> y = load<4>(&b[column][k]);
      for (unsigned j = 0; j < 4; ++j)
        sum = fmaf(x[i % 4 / 2].at[j], y.at[j], sum);
    });
  }
}

// sums += weights b, of the warp's weights and a tile.
template <unsigned n, unsigned m, unsigned columns, unsigned padded>
__device__ void multiply_weights(float (&sums)[n][4], const float (&weights)[m][4], const bf16 (&b)[columns][padded]) {
  const unsigned lane = threadIdx.x % warp;
#pragma unroll
  for (unsigned k = 0; k < m; k += 2) {
    const std::uint32_t x[4] = {join(weights[k]), join(weights[k] + 2), join(weights[k + 1]), join(weights[k + 1] + 2)};
#pragma unroll
    for (unsigned i = 0; i < n; i += 2) {
      std::uint32_t y[4];
      load_matrices<true>(y, &b[8 * k + lane % 16][8 * i + lane / 16 * 8]);
      multiply_tensors(sums[i], x, y[0], y[1]);
      multiply_tensors(sums[i + 1], x, y[2], y[3]);
    }
  }
}

template <unsigned n, unsigned m, unsigned columns, unsigned padded>
__device__ void multiply_weights(float (&sums)[n][4], const float (&weights)[m][4], const float (&b)[columns][padded]) {
#pragma unroll
  for (unsigned k = 0; k < columns; ++k) {
    const unsigned lane = threadIdx.x % warp / 4 * 4 + k % 8 / 2;
    const float x[2] = {__shfl_sync(whole_warp, weights[k / 8][k % 2], lane),
                        __shfl_sync(whole_warp, weights[k / 8][2 + k % 2], lane)};
    each_value(sums, 0, 0,
               [&](float& sum, unsigned i, unsigned, unsigned column) { sum = fmaf(x[i % 4 / 2], b[k][column], sum); });
  }
}

// --- Weights ---

// The softmax of each lane's two rows, over the columns that were seen.
struct RunningSoftmax {
  float most[2] = {-INFINITY, -INFINITY};
  float total[2] = {0, 0};  // of the lane's columns

  // Turns scores into weights, relative to the largest score until now, and makes earlier sums relative to it too.
  template <unsigned n, unsigned m>
  __device__ void take(float (&scores)[n][4], unsigned row, unsigned first, float scale, float (&sums)[m][4]) {
    const float former[2] = {most[0], most[1]};
    each_value(scores, row, first, [&](float& score, unsigned i, unsigned query, unsigned key) {
      score = key <= query ? scale * score : -INFINITY;
      most[i % 4 / 2] = fmaxf(most[i % 4 / 2], score);
    });
    float kept[2];
    for (unsigned half = 0; half < 2; ++half) {
      for (unsigned distance = 1; distance < 4; distance *= 2)
        most[half] = fmaxf(most[half], __shfl_xor_sync(whole_warp, most[half], distance));
      kept[half] = expf(former[half] - most[half]);
      total[half] *= kept[half];
    }
    each_value(scores, 0, 0, [&](float& score, unsigned i, unsigned, unsigned) {
      score = expf(score - most[i % 4 / 2]);
      total[i % 4 / 2] += score;
    });
    each_value(sums, 0, 0, [&](float& sum, unsigned i, unsigned, unsigned) { sum *= kept[i % 4 / 2]; });
  }

  // Divides by the sums of weights, and writes the logarithms of the sums.
  template <unsigned m>
  __device__ void finish(float (&sums)[m][4], unsigned row, unsigned count, float* logarithms) {
    for (unsigned half = 0; half < 2; ++half) {
      for (unsigned distance = 1; distance < 4; distance *= 2)
        total[half] += __shfl_xor_sync(whole_warp, total[half], distance);
      const unsigned mine = row + lane_row() + 8 * half;
      if (lane_column() == 0 && mine < count) logarithms[mine] = most[half] + logf(total[half]);
    }
    const float factor[2] = {1.0f / total[0], 1.0f / total[1]};
    each_value(sums, 0, 0, [&](float& sum, unsigned i, unsigned, unsigned) { sum *= factor[i % 4 / 2]; });
  }
};

enum class Wanted { output, query_gradient, key_gradient, value_gradient };
constexpr bool is_by_query(Wanted wanted) { return wanted == Wanted::output || wanted == Wanted::query_gradient; }

// --- The kernel ---

struct AttentionMemory {
  unsigned sequences, context, heads, kv_heads, head_width;
  float scale;
  const std::byte *query, *key, *value, *gradient{};  // the gradient is that of the output
  const float *sums{}, *along{};                      // for each row of each head
  float* new_sums{};                                  // the forward pass writes them

  constexpr unsigned tiles() const { return (context + tile_rows - 1) / tile_rows; }
  constexpr unsigned heads_of(Wanted wanted) const { return is_by_query(wanted) ? heads : kv_heads; }
  constexpr std::size_t pieces(Wanted wanted) const { return std::size_t{tiles()} * sequences * heads_of(wanted); }

  // The rows of one of all heads, sequence by sequence.
  template <class T>
  __device__ HeadRows<T> rows(T* all, unsigned number, unsigned of_heads) const {
    const std::size_t stride = std::size_t{of_heads} * head_width, sequence = number / of_heads;
    return {all + sequence * context * stride + number % of_heads * head_width, stride, context, head_width};
  }
  template <class T>
  __device__ HeadRows<const T> rows(const std::byte* all, unsigned number, unsigned of_heads) const {
    return rows(reinterpret_cast<const T*>(all), number, of_heads);
  }
};

// Turns scores into weights, or with the gradients of the weights into those of the scores.
template <Wanted wanted, unsigned n>
__device__ void weigh(float (&scores)[n][4], const float (&slopes)[n][4], const AttentionMemory& m, unsigned head,
                      unsigned row, unsigned first) {
  each_value(scores, row, first, [&](float& score, unsigned i, unsigned mine, unsigned other) {
    const unsigned query = is_by_query(wanted) ? mine : other, key = is_by_query(wanted) ? other : mine;
    const std::size_t at = std::size_t{head} * m.context + query;
    const bool is_seen = key <= query && query < m.context;
    score = is_seen ? expf(m.scale * score - m.sums[at]) : 0.0f;
    if (is_seen && wanted != Wanted::value_gradient) score *= m.scale * (slopes[i / 4][i % 4] - m.along[at]);
  });
}

// A block computes the output or the gradient of a tile of queries from all keys that they see, or the gradient of a tile of keys or
// values from all queries that see them. The first are the rows, the others the columns.
template <class T, unsigned width, Wanted wanted>
__global__ void __launch_bounds__(attention_threads, 2) attention_kernel(AttentionMemory m, T* to) {
  constexpr bool by_query = is_by_query(wanted), is_forward = wanted == Wanted::output;
  constexpr unsigned columns = tile_columns<T, width>;
  alignas(16) __shared__ Tile<T, width> tile_a, tile_b;
  const unsigned heads = m.heads_of(wanted), group = m.heads / m.kv_heads, members = by_query ? 1 : group;
  each_piece(m.pieces(wanted), [&](std::size_t piece) {
    const unsigned mine = static_cast<unsigned>(piece / m.tiles()), number = static_cast<unsigned>(piece % m.tiles());
    const unsigned tile = (by_query ? m.tiles() - 1 - number : number) * tile_rows;  // the tiles with most work first
    const unsigned row = tile + threadIdx.x / warp * warp_rows;
    const unsigned end = by_query && tile + tile_rows < m.context ? tile + tile_rows : m.context;
    float sums[width / 8][4] = {};
    RunningSoftmax softmax;
    for (unsigned head = mine * members; head < (mine + 1) * members; ++head) {
      const auto query = m.rows<T>(m.query, head, m.heads), gradient = m.rows<T>(m.gradient, head, m.heads);
      const auto key = m.rows<T>(m.key, head / group, m.kv_heads), value = m.rows<T>(m.value, head / group, m.kv_heads);
      for (unsigned first = by_query ? 0 : tile; first < end; first += columns) {
        __syncthreads();
        load_tile(tile_a, by_query ? key : query, first);
        load_tile(tile_b, by_query ? value : gradient, first);
        __syncthreads();
        float weights[columns / 8][4] = {}, slopes[columns / 8][4] = {};
        multiply_rows(weights, by_query ? query : key, row, tile_a);
        if constexpr (is_forward) {
          softmax.take(weights, row, first, m.scale, sums);
        } else {
          if (wanted != Wanted::value_gradient) multiply_rows(slopes, by_query ? gradient : value, row, tile_b);
          weigh<wanted>(weights, slopes, m, head, row, first);
        }
        multiply_weights(sums, weights, is_forward || wanted == Wanted::value_gradient ? tile_b : tile_a);
      }
    }
    if constexpr (is_forward) softmax.finish(sums, row, m.context, m.new_sums + std::size_t{mine} * m.context);
    const HeadRows<T> rows = m.rows(to, mine, heads);
    each_value(sums, row, 0, [&](float sum, unsigned, unsigned line, unsigned column) {
      if (line < rows.count && column < rows.width) rows.at(line)[column] = narrow<T>(sum);
    });
  });
}

}  // namespace
}  // namespace ballast::llama
