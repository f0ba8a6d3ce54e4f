#include "tests/emulated_cuda/torch/device.h"

#include <c10/util/Exception.h>

#include <array>
#include <future>
#include <memory>

#include "tests/emulated_cuda/emulated.h"

namespace emulated_torch {
namespace {

thread_local std::array<cudaStream_t, emulated::max_gpus> current{};

}  // namespace

void check(cudaError_t result, const char* call) {
  if (result == cudaErrorMemoryAllocation) TORCH_CHECK_WITH(OutOfMemoryError, false, call, ": out of memory");
  TORCH_CHECK(result == cudaSuccess, call, ": ", cudaGetErrorString(result));
}

int gpus() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  return count;
}

int current_gpu() {
  int gpu = 0;
  check(cudaGetDevice(&gpu), "cudaGetDevice");
  return gpu;
}

OnGpu::OnGpu(int gpu) : before_(current_gpu()) {
  if (gpu != before_) check(cudaSetDevice(gpu), "cudaSetDevice");
}

// A GPU without a context is not made current again: that would make one.
OnGpu::~OnGpu() {
  if (before_ != current_gpu()) cudaSetDevice(before_);
}

cudaStream_t handle_of(const c10::Stream& stream) { return reinterpret_cast<cudaStream_t>(stream.id()); }

c10::Stream stream_of(int gpu, cudaStream_t handle) {
  const c10::Device device(device_type, static_cast<c10::DeviceIndex>(gpu));
  return c10::Stream(c10::Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(handle));
}

cudaStream_t current_stream(int gpu) { return current.at(static_cast<std::size_t>(gpu)); }

cudaStream_t exchange_stream(int gpu, cudaStream_t stream) {
  return std::exchange(current.at(static_cast<std::size_t>(gpu)), stream);
}

void count_wait() { emulated::count("wait of torch"); }

void wait_for_stream(cudaStream_t stream) {
  count_wait();
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

void launch(int gpu, std::vector<emulated::Access> accesses, std::function<void()> kernel) {
  const OnGpu on(gpu);
  check(emulated::launch_foreign(current_stream(gpu), std::move(accesses), std::move(kernel)), "kernel");
}

void launch_and_wait(int gpu, std::vector<emulated::Access> accesses, const std::function<void()>& kernel) {
  auto end = std::make_shared<std::promise<void>>();
  std::future<void> ended = end->get_future();
  launch(gpu, std::move(accesses), [&kernel, end = std::move(end)] {
    kernel();
    end->set_value();
  });
  emulated::want_all_of(current_stream(gpu));
  ended.get();  // throws if the context has failed, because the promise is then dropped
}

}  // namespace emulated_torch
