// What the parts of torch's backend share: errors, devices, current streams and launches.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>
#include <vector>

#include "tests/emulated_cuda/include/cuda_runtime_api.h"
#include "tests/emulated_cuda/memory_order.h"

namespace emulated_torch {

constexpr c10::DeviceType device_type = c10::DeviceType::PrivateUse1;

void check(cudaError_t result, const char* call);  // throws torch's error

int gpus();
int current_gpu();

// Makes a GPU the thread's current one inside of a block.
class OnGpu {
 public:
  explicit OnGpu(int gpu);
  ~OnGpu();
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

 private:
  int before_;
};

// A stream's number in torch is its handle.
cudaStream_t handle_of(const c10::Stream& stream);
c10::Stream stream_of(int gpu, cudaStream_t handle);
cudaStream_t current_stream(int gpu);  // the current stream of this thread
cudaStream_t exchange_stream(int gpu, cudaStream_t stream);

// The host's waits for the GPU that torch makes. They are counted apart from Ballast's.
void wait_for_stream(cudaStream_t stream);
void count_wait();

// Adds a kernel to the thread's current stream of this GPU. Its pointers are those of emulated::in_work().
void launch(int gpu, std::vector<emulated::Access> accesses, std::function<void()> kernel);
// The same, and returns when the kernel has ended. CUDA has no such call, so this is not counted as a wait.
void launch_and_wait(int gpu, std::vector<emulated::Access> accesses, const std::function<void()>& kernel);

}  // namespace emulated_torch
