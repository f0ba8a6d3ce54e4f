// Launches of kernels. Blocks run one after the other, in another order than CUDA would probably choose.
#include <atomic>
#include <mutex>
#include <set>

#include "tests/emulated_cuda/block.h"
#include "tests/emulated_cuda/calls.h"
#include "tests/emulated_cuda/devices.h"
#include "tests/emulated_cuda/include/kernel_language.h"
#include "tests/emulated_cuda/kernel_accesses.h"
#include "tests/emulated_cuda/live.h"
#include "tests/emulated_cuda/rules.h"

constinit thread_local uint3 blockIdx{};
constinit thread_local dim3 blockDim{};
constinit thread_local dim3 gridDim{};

namespace emulated {
namespace {

std::mutex mutex;  // guards the set
auto& loaded = never_destroyed<std::set<const void*>>();

// CUDA loads a kernel when it is first used, and may wait for all work of the GPU meanwhile. If a kernel of NCCL waits
// for another rank, that rank may wait for this one's kernel.
void load(const void* kernel, bool by_launch) {
  const std::lock_guard lock(mutex);
  if (!loaded.insert(kernel).second || !by_launch || live_communicators() == 0) return;
  broken("kernels are loaded before NCCL works", "a kernel was first launched after a communicator had been made");
}

void run_blocks(const cudaLaunchConfig_t& config, const Thread& thread) {
  gridDim = config.gridDim;
  blockDim = config.blockDim;
  for (unsigned last = config.gridDim.x; last > 0; --last) {
    blockIdx = {last - 1, 0, 0};
    run_block(config.blockDim.x, thread);
  }
}

}  // namespace

void use_kernel(const void* kernel) { load(kernel, true); }

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, const Thread& thread) {
  return call("kernel", Context::on_current, [&] {
    CUstream_st& stream = stream_of(config.stream);
    if (stream.gpu != current_gpu()) return cudaErrorInvalidResourceHandle;
    if (config.gridDim.x == 0 || config.blockDim.x == 0 || config.blockDim.x > 1024) return cudaErrorInvalidValue;
    use_kernel(kernel);
    stream.issue("a kernel", {}, [config, thread] { run_blocks(config, thread); });
    return cudaSuccess;
  });
}

cudaError_t launch_foreign(cudaStream_t handle, std::vector<Access> accesses, std::function<void()> kernel) {
  return call("foreign kernel", Context::on_current, [&] {
    CUstream_st& stream = stream_of(handle);
    if (stream.gpu != current_gpu()) return cudaErrorInvalidResourceHandle;
    stream.issue("a foreign kernel", std::move(accesses), std::move(kernel));
    return cudaSuccess;
  });
}

void want_all_of(cudaStream_t stream) { stream_of(stream).queue->is_idle(); }

}  // namespace emulated

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  return emulated::call("cudaFuncGetAttributes", emulated::Context::on_current, [&] {
    *attributes = {.maxThreadsPerBlock = 1024};
    emulated::load(kernel, false);
    return cudaSuccess;
  });
}

unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  emulated::record(at, sizeof *at, true);
  return std::atomic_ref(*at).fetch_add(value, std::memory_order_relaxed);
}

unsigned long long atomicMin(unsigned long long* at, unsigned long long value) {
  emulated::record(at, sizeof *at, true);
  std::atomic_ref place(*at);
  unsigned long long now = place.load(std::memory_order_relaxed);
  while (value < now && !place.compare_exchange_weak(now, value, std::memory_order_relaxed)) {
  }
  return now;
}
