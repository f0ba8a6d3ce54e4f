#include "kernels/cuda_launch.cuh"

#include <algorithm>

namespace ballast::kernels {
namespace {

// Enough that little is idle while the last ones end.
constexpr std::size_t blocks_per_multiprocessor = 16;

}  // namespace

CurrentGpu::CurrentGpu(int gpu) {
  check_cuda(cudaGetDevice(&former_), "asking for the current GPU");
  if (former_ != gpu) {
    check_cuda(cudaSetDevice(gpu), "choosing a GPU");
    changed_ = true;
  }
}

CurrentGpu::~CurrentGpu() {
  if (changed_) {
    cudaSetDevice(former_);
  }
}

Cuda cuda_on(StreamHandle stream, int gpu) {
  int multiprocessors = 0;
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, gpu), "asking for a GPU's size");
  return {.stream = stream, .gpu = gpu, .multiprocessors = static_cast<unsigned>(multiprocessors)};
}

unsigned blocks_for(const Cuda& cuda, std::size_t chunks) {
  return static_cast<unsigned>(std::min(chunks, cuda.multiprocessors * blocks_per_multiprocessor));
}

}  // namespace ballast::kernels
