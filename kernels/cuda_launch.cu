#include "kernels/cuda_launch.cuh"

#include <algorithm>
#include <mutex>
#include <set>
#include <vector>

namespace ballast::kernels {
namespace {

// Enough blocks that few multiprocessors are idle while the last blocks end.
constexpr std::size_t blocks_per_multiprocessor = 16;

std::vector<const void*>& all_kernels() {
  static std::vector<const void*> kernels;
  return kernels;
}

// CUDA loads a kernel at its first launch, and may wait for all work of the GPU meanwhile. If a kernel of NCCL waits for
// another rank, and that rank for this one's kernel, both wait for ever.
void load_all_kernels(int gpu) {
  static std::mutex mutex;
  static std::set<int> loaded;
  const std::lock_guard lock(mutex);
  if (loaded.contains(gpu)) return;
  const CurrentGpu current(gpu);
  for (const void* kernel : all_kernels()) {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
  }
  loaded.insert(gpu);
}

}  // namespace

bool register_kernel(const void* kernel) {
  all_kernels().push_back(kernel);
  return true;
}

Cuda cuda_on(StreamHandle stream, int gpu) {
  load_all_kernels(gpu);
  int multiprocessors = 0;
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, gpu), "reading a GPU's size");
  return {.stream = stream, .gpu = gpu, .multiprocessors = static_cast<unsigned>(multiprocessors)};
}

unsigned blocks_for(const Cuda& cuda, std::size_t chunks) {
  return static_cast<unsigned>(std::min(chunks, cuda.multiprocessors * blocks_per_multiprocessor));
}

}  // namespace ballast::kernels
