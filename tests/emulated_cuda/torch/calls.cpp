// What the Python module of the emulated GPUs calls. See tests/python/emulated_gpu.py.
#include <chrono>
#include <cstdint>
#include <thread>

#include "tests/emulated_cuda/emulated.h"
#include "tests/emulated_cuda/torch/device.h"
#include "tests/emulated_cuda/torch/memory.h"

extern "C" {

void emulated_set_machine(int gpus, std::size_t memory_bytes) {
  emulated::set_machine({.gpus = gpus, .memory_bytes = memory_bytes});
}
void emulated_allow_context_only_on(int gpu) { emulated::allow_context_only_on(gpu); }

std::size_t emulated_free_bytes(int gpu) {
  const emulated_torch::OnGpu on(gpu);
  std::size_t available = 0, total = 0;
  return cudaMemGetInfo(&available, &total) == cudaSuccess ? available : 0;
}
std::size_t emulated_total_bytes(int gpu) {
  cudaDeviceProp properties{};
  return cudaGetDeviceProperties(&properties, gpu) == cudaSuccess ? properties.totalGlobalMem : 0;
}
// Allocates memory of the current GPU, which stays unused; null if too little is free.
void* emulated_take(std::size_t bytes) {
  void* memory = nullptr;
  return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : nullptr;
}
void emulated_give_back(void* memory) { cudaFree(memory); }
void emulated_sleep(int milliseconds) {
  emulated_torch::launch(emulated_torch::current_gpu(), {},
                         [milliseconds] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
}
void emulated_empty_cache() { emulated_torch::empty_cache(); }

void emulated_reset_counts() { emulated::reset_counts(); }
std::size_t emulated_count(const char* call) {
  const emulated::Counts counts = emulated::counts_of_this_thread();
  const auto found = counts.find(call);
  return found == counts.end() ? 0 : found->second;
}
}
