// What nvcc adds to C++, for kernels that a host compiler compiles: each .cu file is compiled with this header before it.
#pragma once

#include <math.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>

#include "tests/emulated_cuda/include/cuda_runtime_api.h"

// NOLINTBEGIN(bugprone-reserved-identifier): the names are CUDA's
#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local  // the threads of a block share a thread of the host

struct uint3 {
  unsigned x, y, z;
};
extern constinit thread_local uint3 threadIdx;
extern constinit thread_local uint3 blockIdx;
extern constinit thread_local dim3 blockDim;
extern constinit thread_local dim3 gridDim;

namespace emulated {

// Returns the value of a thread of the same warp, when all threads of `mask` have called.
std::uint64_t exchange_in_warp(unsigned mask, std::uint64_t mine, unsigned source_lane);
unsigned lane_of_this_thread();

// Instructions of tensor cores, with matrices that a warp holds: mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32, and
// ldmatrix.sync.aligned.m8n8.x4(.trans).shared.b16.
void multiply_tensors(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);
void load_matrices(std::uint32_t (&to)[4], const void* row, bool transposed);

using Thread = std::function<void()>;
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, const Thread& thread);
void give_access(void* words, std::size_t bytes);

}  // namespace emulated

void __syncthreads();
void __syncwarp(unsigned mask = 0xffffffffu);

template <class T>
T __shfl_sync(unsigned mask, T value, unsigned source_lane) {
  static_assert(sizeof value <= sizeof(std::uint64_t));
  std::uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  word = emulated::exchange_in_warp(mask, word, source_lane % 32);
  std::memcpy(&value, &word, sizeof value);
  return value;
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned distance) {
  return __shfl_sync(mask, value, emulated::lane_of_this_thread() ^ distance);
}

unsigned long long atomicAdd(unsigned long long* at, unsigned long long value);
unsigned long long atomicMin(unsigned long long* at, unsigned long long value);

inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }

// Copies the arguments at the call, as CUDA does.
template <class... Expected, class... Actual>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Expected...), Actual&&... arguments) {
  static_assert((std::is_trivially_copyable_v<std::decay_t<Expected>> && ...));
  std::tuple<std::decay_t<Expected>...> copies(std::forward<Actual>(arguments)...);
  // NOLINTNEXTLINE(bugprone-sizeof-expression): an argument may be a pointer
  std::apply([](auto&... copy) { (emulated::give_access(&copy, sizeof(copy)), ...); }, copies);
  return emulated::launch(*config, reinterpret_cast<const void*>(kernel),
                          [kernel, copies] { std::apply(kernel, copies); });
}
// NOLINTEND(bugprone-reserved-identifier)
