// The launch of CUDA walks, and the division of their work: each block of threads takes one chunk at a time.
#pragma once

#include <string_view>

#include "kernels/cuda.h"
#include "kernels/octet.h"
#include "kernels/runtime/cuda_check.h"
#include "kernels/runtime/device.h"

namespace ballast::kernels {

unsigned blocks_for(const Cuda& cuda, std::size_t chunks);

// Kernels register themselves before main(), so that all can be loaded before work of NCCL may wait for them.
bool register_kernel(const void* kernel);

template <auto kernel>
inline const bool is_registered = register_kernel(reinterpret_cast<const void*>(kernel));

// Does nothing if there are no chunks.
template <auto kernel, class... Arguments>
void launch(const Cuda& cuda, std::string_view what, std::size_t chunks, const Arguments&... arguments) {
  if (chunks > 0 && is_registered<kernel>) {
    const CurrentGpu current(cuda.gpu);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3{blocks_for(cuda, chunks), 1, 1};
    config.blockDim = dim3{threads_per_chunk, 1, 1};
    config.stream = cuda.stream;
    check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), what);
  }
}

// Calls body(chunk) for each chunk of the calling thread's block.
template <class Body>
__device__ void each_chunk(std::size_t chunks, Body&& body) {
  for (std::size_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    body(chunk);
  }
}

// Launches a kernel on an array; its last parameter is the array's stretch.
template <auto kernel, class... Arguments>
void launch_on_array(const Cuda& cuda, std::string_view what, std::size_t count, bool aligned,
                     const Arguments&... arguments) {
  const Stretch all = whole_array(count, aligned);
  launch<kernel>(cuda, what, all.chunks_end, arguments..., all);
}

// Calls body(place) for the elements of the calling thread.
template <class Body>
__device__ void each_place(const Stretch& all, Body&& body) {
  each_chunk(all.chunks_end, [&](std::size_t chunk) { body(place_in(all, chunk, threadIdx.x)); });
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
