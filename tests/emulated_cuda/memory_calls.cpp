// cudaMalloc, cudaFree, copies and fills.
#include <cstring>

#include "tests/emulated_cuda/calls.h"
#include "tests/emulated_cuda/devices.h"
#include "tests/emulated_cuda/host_accesses.h"
#include "tests/emulated_cuda/memory_access.h"
#include "tests/emulated_cuda/pinned_memory.h"
#include "tests/emulated_cuda/rules.h"

namespace emulated {

DeviceMemory* memory_of(const void* address) {
  for (Device* const device : devices_with_context()) {
    if (device->memory.contains(address)) return &device->memory;
  }
  return nullptr;
}

namespace {

enum class Kind { device, pinned, pageable, invalid };

Kind kind_of(const void* address, std::size_t bytes) {
  if (DeviceMemory* const memory = memory_of(address)) {
    return memory->is_allocated(address, bytes) ? Kind::device : Kind::invalid;
  }
  return is_pinned(address, bytes) ? Kind::pinned : Kind::pageable;
}

std::size_t device_bytes() {
  std::size_t bytes = 0;
  for (Device* const device : devices_with_context()) {
    bytes += device->memory.used();
  }
  return bytes;
}

}  // namespace

std::size_t live_device_bytes() { return device_bytes(); }

}  // namespace emulated

using emulated::call;
using emulated::Context;
using emulated::Kind;

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  return call("cudaMalloc", Context::on_current, [&] {
    *memory = emulated::device(emulated::current_gpu()).memory.allocate(bytes);
    return *memory != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
  });
}

// Waits for the GPU's work, as CUDA does.
cudaError_t cudaFree(void* memory) {
  return emulated::releasing_call("cudaFree", [&] {
    if (memory == nullptr) return cudaSuccess;
    for (emulated::Device* const device : emulated::devices_with_context()) {
      if (!device->memory.contains(memory)) continue;
      emulated::wait_for_all_streams_of(device->gpu);
      return device->memory.release(static_cast<std::byte*>(memory)) ? cudaSuccess : cudaErrorInvalidValue;
    }
    return cudaErrorInvalidValue;
  });
}

cudaError_t cudaMemGetInfo(std::size_t* available, std::size_t* total) {
  return call("cudaMemGetInfo", Context::on_current, [&] {
    *available = emulated::device(emulated::current_gpu()).memory.available();
    *total = emulated::total_memory();
    return cudaSuccess;
  });
}

// The caller waits if an end is pageable, because the driver then copies through memory of its own.
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return call("cudaMemcpyAsync", Context::on_current, [&] {
    const Kind target = emulated::kind_of(to, bytes), source = emulated::kind_of(from, bytes);
    if (target == Kind::invalid || source == Kind::invalid) return cudaErrorInvalidValue;
    CUstream_st& queue = emulated::stream_of(stream);
    std::vector<emulated::Access> accesses;
    if (source != Kind::pageable) accesses.push_back({from, bytes, false});
    if (target != Kind::pageable) accesses.push_back({to, bytes, true});
    emulated::begin_copy(to);
    emulated::begin_copy(from);
    queue.issue("cudaMemcpyAsync", std::move(accesses),
                [=] { emulated::copy_in_work(emulated::in_work(to), emulated::in_work(from), bytes); });
    queue.add([=] {
      emulated::end_copy(to);
      emulated::end_copy(from);
    });
    if (target == Kind::pageable || source == Kind::pageable) {
      emulated::count("copy that waits");
      queue.wait();
    }
    return cudaSuccess;
  });
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return call("cudaMemsetAsync", Context::on_current, [&] {
    if (emulated::kind_of(to, bytes) != Kind::device) return cudaErrorInvalidValue;
    emulated::stream_of(stream).issue("cudaMemsetAsync", {{to, bytes, true}},
                                      [=] { std::memset(emulated::in_work(to), value, bytes); });
    return cudaSuccess;
  });
}
