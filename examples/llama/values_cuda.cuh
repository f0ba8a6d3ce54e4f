// What the kernels share: teams of threads, and access to values in fp32 or bf16.
#pragma once

#include <ballast/view.h>

#include <bit>

namespace ballast::llama {
namespace {

constexpr unsigned threads = 256;  // of a block
constexpr unsigned warp = 32;
constexpr unsigned whole_warp = 0xffffffffu;

constexpr std::size_t divide_up(std::size_t count, std::size_t by) { return (count + by - 1) / by; }

// Calls body(piece) for each piece of work of the calling block.
template <class Body>
__device__ void each_piece(std::size_t count, Body body) {
  for (std::size_t piece = blockIdx.x; piece < count; piece += gridDim.x)
    body(piece);
}

__device__ float widen(float x) { return x; }
__device__ float widen(bf16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }

// Rounds to nearest, ties to even. A NaN stays one.
template <class T>
__device__ T narrow(float x) {
  if constexpr (sizeof(T) == sizeof x) {
    return x;
  } else {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return {static_cast<std::uint16_t>(x != x ? bits >> 16 | 0x40u : rounded)};
  }
}

// Neighbouring values, which a thread reads or writes at once.
template <unsigned count>
struct Pack {
  float at[count];

  __device__ void operator+=(const Pack& other) {
    for (unsigned i = 0; i < count; ++i)
      at[i] += other.at[i];
  }
};

// Values in memory that are read or written at once. Their address is a multiple of their size, or of 16 bytes.
template <class T, unsigned count>
struct alignas(count * sizeof(T) < 16 ? count * sizeof(T) : 16) Stored {
  T at[count];
};

template <unsigned count, class T>
__device__ auto& stored(T* at) {
  return *reinterpret_cast<Stored<T, count>*>(at);
}
template <unsigned count, class T>
__device__ const auto& stored(const T* at) {
  return *reinterpret_cast<const Stored<T, count>*>(at);
}

template <unsigned count, class T>
__device__ Pack<count> load(const T* from) {
  const Stored<T, count> values = stored<count>(from);
  Pack<count> to;
  for (unsigned i = 0; i < count; ++i)
    to.at[i] = widen(values.at[i]);
  return to;
}

template <unsigned count, class T>
__device__ void store(const Pack<count>& from, T* to) {
  Stored<T, count> values;
  for (unsigned i = 0; i < count; ++i)
    values.at[i] = narrow<T>(from.at[i]);
  stored<count>(to) = values;
}

// Calls body(row, place) for each row of the calling team, a warp or a block. `place` is that of the thread in its team.
template <class Body>
__device__ void each_row(std::size_t rows, unsigned team, Body body) {
  const unsigned teams = threads / team;
  for (std::size_t row = std::size_t{blockIdx.x} * teams + threadIdx.x / team; row < rows;
       row += std::size_t{gridDim.x} * teams)
    body(row, threadIdx.x % team);
}

// Joins a team's values, in one order: each thread gets the same bits.
template <class Join>
__device__ float join_team(float x, unsigned team, Join join) {
  __shared__ float joined[threads / warp];
  for (unsigned distance = warp / 2; distance > 0; distance /= 2)
    x = join(x, __shfl_xor_sync(whole_warp, x, distance));
  if (team == warp) return x;
  __syncthreads();
  if (threadIdx.x % warp == 0) joined[threadIdx.x / warp] = x;
  __syncthreads();
  x = joined[0];
  for (unsigned i = 1; i < threads / warp; ++i)
    x = join(x, joined[i]);
  return x;
}
__device__ float sum_of_team(float x, unsigned team) {
  return join_team(x, team, [](float a, float b) { return a + b; });
}

}  // namespace
}  // namespace ballast::llama
