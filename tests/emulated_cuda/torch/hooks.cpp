// What torch's generic code asks of an accelerator.
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "tests/emulated_cuda/devices.h"
#include "tests/emulated_cuda/pinned_memory.h"
#include "tests/emulated_cuda/torch/device.h"
#include "tests/emulated_cuda/torch/generator.h"
#include "tests/emulated_cuda/torch/memory.h"

namespace emulated_torch {
namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return gpus() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex gpu) const override {
    for (const int each : emulated::gpus_with_context()) {
      if (each == gpu) return true;
    }
    return false;
  }

  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(gpus()); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_gpu()); }
  void setCurrentDevice(c10::DeviceIndex gpu) const override { check(cudaSetDevice(gpu), "cudaSetDevice"); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex gpu) const override {
    const c10::DeviceIndex before = getCurrentDevice();
    if (gpu >= 0 && gpu != before) setCurrentDevice(gpu);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex gpu) const override { return exchangeDevice(gpu); }

  bool isPinnedPtr(const void* memory) const override { return emulated::is_pinned(memory, 1); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* memory) const override {
    for (const emulated::Device* const device : emulated::devices_with_context()) {
      if (device->memory.contains(memory)) return {device_type, static_cast<c10::DeviceIndex>(device->gpu)};
    }
    TORCH_CHECK(false, "this memory is not of an emulated GPU");
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex gpu) const override { return default_generator(gpu); }
  at::Generator getNewGenerator(c10::DeviceIndex gpu) const override {
    return new_generator(gpu < 0 ? current_gpu() : gpu);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    const OnGpu on(storage.device().index());
    c10::DataPtr memory = device_allocator().allocate(bytes);
    if (const std::size_t kept = std::min(bytes, storage.nbytes()); kept > 0) {
      check(cudaMemcpyAsync(memory.get(), storage.data(), kept, cudaMemcpyDefault, current_stream(current_gpu())),
            "cudaMemcpyAsync");
    }
    storage.set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

const bool are_torchs_hooks = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace emulated_torch
