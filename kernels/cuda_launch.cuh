// The launch of CUDA walks, and the division of their work: each block of threads takes one chunk at a time.
#pragma once

#include <string_view>

#include "kernels/chunks.h"
#include "kernels/cuda.h"
#include "kernels/runtime/cuda_check.h"
#include "kernels/runtime/current_gpu.h"

namespace ballast::kernels {

unsigned blocks_for(const Cuda& cuda, std::size_t chunks);

// Does nothing if there are no chunks.
template <class... Arguments>
void launch(const Cuda& cuda, std::string_view what, std::size_t chunks, void (*kernel)(Arguments...),
            const std::type_identity_t<Arguments>&... arguments) {
  if (chunks > 0) {
    const CurrentGpu current(cuda.gpu);
    kernel<<<blocks_for(cuda, chunks), threads_per_chunk, 0, cuda.stream>>>(arguments...);
    check_cuda(cudaGetLastError(), what);
  }
}

// Calls body(chunk) for each chunk of the calling thread's block.
template <class Body>
__device__ void each_chunk(std::size_t chunks, Body&& body) {
  for (std::size_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    body(chunk);
  }
}

// Returns the maximum among the sixteen threads of a group.
__device__ inline std::uint32_t max_of_group(std::uint32_t x) {
  const std::uint32_t threads = 0xffffu << (threadIdx.x & 16u);
  for (unsigned distance = threads_per_group / 2; distance > 0; distance /= 2) {
    x = max(x, __shfl_xor_sync(threads, x, distance));
  }
  return x;
}

}  // namespace ballast::kernels
