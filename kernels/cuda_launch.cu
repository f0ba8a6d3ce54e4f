#include "kernels/cuda_launch.cuh"

#include <algorithm>

namespace ballast::kernels {
namespace {

// Enough blocks that few multiprocessors are idle while the last blocks end.
constexpr std::size_t blocks_per_multiprocessor = 16;

}  // namespace

Cuda cuda_on(StreamHandle stream, int gpu) {
  int multiprocessors = 0;
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, gpu), "reading a GPU's size");
  return {.stream = stream, .gpu = gpu, .multiprocessors = static_cast<unsigned>(multiprocessors)};
}

unsigned blocks_for(const Cuda& cuda, std::size_t chunks) {
  return static_cast<unsigned>(std::min(chunks, cuda.multiprocessors * blocks_per_multiprocessor));
}

}  // namespace ballast::kernels
