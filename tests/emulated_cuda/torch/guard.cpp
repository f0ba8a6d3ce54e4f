// How torch's generic code, such as autograd, switches GPUs and streams, and orders streams by events.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <mutex>
#include <vector>

#include "tests/emulated_cuda/emulated.h"
#include "tests/emulated_cuda/torch/device.h"
#include "tests/emulated_cuda/torch/memory.h"

namespace emulated_torch {
namespace {

// Torch makes a few streams for each GPU and gives them out in turn; they live until the process ends.
cudaStream_t next_stream(int gpu) {
  constexpr std::size_t most = 8;
  static std::mutex mutex;
  static std::array<std::vector<cudaStream_t>, emulated::max_gpus> made;
  static std::array<std::size_t, emulated::max_gpus> given{};
  const std::lock_guard lock(mutex);
  const auto index = static_cast<std::size_t>(gpu);
  if (made[index].size() < most) {
    const OnGpu on(gpu);
    made[index].push_back(nullptr);
    check(cudaStreamCreateWithFlags(&made[index].back(), cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  return made[index][given[index]++ % most];
}

cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return device_type; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {device_type, static_cast<c10::DeviceIndex>(current_gpu())}; }
  void setDevice(c10::Device device) const override {
    if (device.index() != current_gpu()) check(cudaSetDevice(device.index()), "cudaSetDevice");
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    int gpu = -1;
    if (cudaGetDevice(&gpu) == cudaSuccess && gpu != device.index()) cudaSetDevice(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? static_cast<c10::DeviceIndex>(count) : c10::DeviceIndex{0};
  }
  void synchronizeDevice(c10::DeviceIndex gpu) const override {
    const OnGpu on(gpu);
    count_wait();
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  c10::Stream getStream(c10::Device device) const override {
    const int gpu = index_of(device);
    return stream_of(gpu, current_stream(gpu));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), nullptr); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_of(index_of(device), next_stream(index_of(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStreamFromGlobalPool(device, false); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int gpu = stream.device_index();
    return stream_of(gpu, exchange_stream(gpu, handle_of(stream)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handle_of(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    const OnGpu on(stream.device_index());
    return cudaStreamQuery(handle_of(stream)) == cudaSuccess;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const OnGpu on(stream.device_index());
    wait_for_stream(handle_of(stream));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_stream(memory, stream);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag) const override {
    const OnGpu on(stream.device_index());
    if (*event == nullptr) {
      cudaEvent_t made = nullptr;
      const unsigned flags = flag == c10::EventFlag::BACKEND_DEFAULT ? cudaEventDefault : cudaEventDisableTiming;
      check(cudaEventCreateWithFlags(&made, flags), "cudaEventCreateWithFlags");
      *event = made;
    }
    check(cudaEventRecord(event_of(*event), handle_of(stream)), "cudaEventRecord");
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const OnGpu on(stream.device_index());
    check(cudaStreamWaitEvent(handle_of(stream), event_of(event), 0), "cudaStreamWaitEvent");
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || cudaEventQuery(event_of(event)) == cudaSuccess;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    count_wait();
    check(cudaEventSynchronize(event_of(event)), "cudaEventSynchronize");
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (event != nullptr) cudaEventDestroy(event_of(event));
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, event_of(begin), event_of(end)), "cudaEventElapsedTime");
    return milliseconds;
  }

 private:
  static int index_of(c10::Device device) { return device.has_index() ? device.index() : current_gpu(); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace emulated_torch
