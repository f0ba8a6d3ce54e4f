#include "tests/emulated_cuda/devices.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>

#include "tests/emulated_cuda/calls.h"
#include "tests/emulated_cuda/include/cuda.h"
#include "tests/emulated_cuda/rules.h"

namespace emulated {
namespace {

std::mutex mutex;  // guards the variables below
Machine machine;
int allowed_gpu = -1;   // -1: all
bool is_child = false;  // forked from a process that had contexts: CUDA ends at a fork
auto& devices = never_destroyed<std::array<std::unique_ptr<Device>, max_gpus>>();

}  // namespace

void set_machine(const Machine& wanted) {
  const std::lock_guard lock(mutex);
  machine = wanted;
}

int gpus() {
  const std::lock_guard lock(mutex);
  return machine.gpus;
}

std::size_t total_memory() {
  const std::lock_guard lock(mutex);
  return machine.memory_bytes;
}

cudaError_t use_context(int gpu, const char* call) {
  const std::lock_guard lock(mutex);
  auto& made = devices[static_cast<std::size_t>(gpu)];
  if (made != nullptr) return is_child ? cudaErrorInitializationError : cudaSuccess;
  if (allowed_gpu >= 0 && gpu != allowed_gpu) {
    broken("a context only on the rank's own GPU", std::string(call) + " made one on GPU " + std::to_string(gpu) +
                                                       ", but this process works on GPU " +
                                                       std::to_string(allowed_gpu));
  }
  if (is_child) return cudaErrorInitializationError;
  static const int is_told_of_forks = ::pthread_atfork(nullptr, nullptr, [] { is_child = true; });
  if (is_told_of_forks != 0) broken("a process that is told of its forks", "pthread_atfork failed");
  made = std::make_unique<Device>(gpu, machine.memory_bytes - context_bytes);
  return cudaSuccess;
}

Device& device(int gpu) {
  const std::lock_guard lock(mutex);
  return *devices[static_cast<std::size_t>(gpu)];
}

std::vector<Device*> devices_with_context() {
  const std::lock_guard lock(mutex);
  std::vector<Device*> all;
  for (const auto& made : devices) {
    if (made != nullptr) all.push_back(made.get());
  }
  return all;
}

std::vector<int> gpus_with_context() {
  std::vector<int> all;
  for (const Device* made : devices_with_context()) {
    all.push_back(made->gpu);
  }
  return all;
}

void allow_context_only_on(int gpu) {
  const std::lock_guard lock(mutex);
  allowed_gpu = gpu;
}

}  // namespace emulated

using emulated::call;
using emulated::Context;

cudaError_t cudaGetDeviceCount(int* count) {
  return call("cudaGetDeviceCount", Context::none, [&] {
    *count = emulated::gpus();
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return call("cudaGetDeviceProperties", Context::none, [&] {
    if (device < 0 || device >= emulated::gpus()) return cudaErrorInvalidDevice;
    *properties = {.name = "emulated GPU", .totalGlobalMem = emulated::total_memory(), .major = 9, .minor = 0};
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device) {
  return call("cudaDeviceGetAttribute", Context::none, [&] {
    if (device < 0 || device >= emulated::gpus()) return cudaErrorInvalidDevice;
    *value = 2;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* address, int bytes, int device) {
  return call("cudaDeviceGetPCIBusId", Context::none, [&] {
    if (device < 0 || device >= emulated::gpus()) return cudaErrorInvalidDevice;
    std::snprintf(address, static_cast<std::size_t>(bytes), "0000:0%d:00.0", device + 1);
    return cudaSuccess;
  });
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  if (device < 0 || device >= emulated::gpus()) return CUDA_ERROR_INVALID_DEVICE;
  const std::lock_guard lock(emulated::mutex);
  *flags = 0;
  *active = emulated::devices[static_cast<std::size_t>(device)] != nullptr;
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
  return call("cudaGetDriverEntryPointByVersion", Context::none, [&] {
    if (std::strcmp(symbol, "cuDevicePrimaryCtxGetState") != 0) return cudaErrorInvalidValue;
    *function = reinterpret_cast<void*>(&cuDevicePrimaryCtxGetState);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceSynchronize() {
  return emulated::releasing_call("cudaDeviceSynchronize", [] {
    emulated::wait_for_all_streams_of(emulated::current_gpu());
    return cudaSuccess;
  });
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInitializationError: return "cudaErrorInitializationError";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    default: return cudaGetErrorName(error);
  }
}
