// The CUDA backend, and the only place that allocates GPU memory or pins host memory.
#include <cuda.h>
#include <fmt/format.h>
#include <nvtx3/nvToolsExt.h>

#include <array>
#include <optional>

#include "kernels/runtime/cuda_check.h"
#include "kernels/runtime/sizes.h"
#include "kernels/runtime/stream.h"

namespace ballast {

void cuda_failed(cudaError_t status, std::string_view what, Site site) {
  cudaGetLastError();  // clears the reported error, which the next launch would report again
  fail(Code::cuda_call,
       {.what = fmt::format("{}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status))}, site);
}

namespace {

// Returns whether this process has a context on the GPU. CUDA's runtime cannot tell; its driver can.
bool has_context(int gpu) {
  static const auto state = [] {
    void* function = nullptr;
    check_cuda(cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &function, 12000, cudaEnableDefault),
               "finding a function of the CUDA driver");
    return reinterpret_cast<CUresult (*)(CUdevice, unsigned*, int*)>(function);
  }();
  unsigned flags = 0;
  int is_active = 0;
  return state(gpu, &flags, &is_active) == CUDA_SUCCESS && is_active != 0;
}

}  // namespace

void CurrentGpu::select(int gpu) {
  check_cuda(cudaGetDevice(&former_), "reading the current GPU");
  if (former_ == gpu) return;
  restores_ = has_context(former_);
  check_cuda(cudaSetDevice(gpu), "choosing a GPU");
}

CurrentGpu::CurrentGpu(int gpu) { select(gpu); }

CurrentGpu::CurrentGpu(int gpu, std::nothrow_t) noexcept {
  try {
    select(gpu);
  } catch (const Error&) {
  }
}

CurrentGpu::~CurrentGpu() {
  if (restores_) cudaSetDevice(former_);
}

ProfilerRange::ProfilerRange(const std::string& name) { nvtxRangePushA(name.c_str()); }
ProfilerRange::~ProfilerRange() { nvtxRangePop(); }

namespace device {
namespace {

struct Count {
  int gpus = 0;
  std::string absence{};
};

Count count() {
  Count found;
  const cudaError_t status = cudaGetDeviceCount(&found.gpus);
  if (status != cudaSuccess) {
    cudaGetLastError();
    return {0, cudaGetErrorString(status)};
  }
  return found.gpus > 0 ? found : Count{0, "the driver lists none"};
}

int existing(int gpu) {
  require_gpu(gpu);
  return gpu;
}

// Destructors use it: they cannot report an error at the end of the process or after a failed kernel.
void ignore(cudaError_t) { cudaGetLastError(); }

}  // namespace

std::vector<Gpu> list() {
  std::vector<Gpu> gpus;
  const int found = count().gpus;
  for (int ordinal = 0; ordinal < found; ++ordinal) {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, ordinal), "reading a GPU's properties");
    gpus.push_back({.name = properties.name,
                    .pci = pci(ordinal),
                    .memory_bytes = properties.totalGlobalMem,
                    .major = properties.major,
                    .minor = properties.minor});
  }
  return gpus;
}

std::string pci(int gpu) {
  std::array<char, 32> address{};
  if (gpu < 0 || gpu >= count().gpus) return {};
  check_cuda(cudaDeviceGetPCIBusId(address.data(), static_cast<int>(address.size()), gpu),
             "reading a GPU's PCI address");
  return address.data();
}

std::string absence() { return count().absence; }

void require_gpu(int gpu) {
  const Count found = count();
  require(gpu >= 0 && gpu < found.gpus, Code::no_cuda_device, [&] {
    return Problem{.what = fmt::format("cannot use GPU {}: there is no such GPU", gpu),
                   .available = found.gpus == 0 ? "none: " + found.absence : fmt::format("0 to {}", found.gpus - 1)};
  });
}

// Only threads of our own call this. Without the mode, their calls would break a CUDA graph that another thread captures.
void choose_gpu(int gpu) {
  check_cuda(cudaSetDevice(existing(gpu)), "choosing a GPU");
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "leaving captured streams alone");
}

std::byte* allocate(std::size_t bytes, int gpu, std::string_view owner) {
  const CurrentGpu current(existing(gpu));
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    fail(Code::device_memory, {.what = fmt::format("cannot allocate memory of GPU {}: too little is free", gpu),
                               .where = std::string(owner),
                               .needed = human_bytes(bytes),
                               .available = human_bytes(available_bytes(gpu))});
  }
  check_cuda(status, "allocating GPU memory");
  return static_cast<std::byte*>(memory);
}

void release(std::byte* memory) noexcept { ignore(cudaFree(memory)); }

std::size_t available_bytes(int gpu) {
  const CurrentGpu current(existing(gpu));
  std::size_t available = 0;
  std::size_t total = 0;
  check_cuda(cudaMemGetInfo(&available, &total), "reading the free GPU memory");
  return available;
}

std::string pin(std::byte* memory, std::size_t bytes, int gpu, Access access) {
  if (const Count found = count(); found.gpus == 0) {
    return "no GPU: " + found.absence;
  }
  const CurrentGpu current(existing(gpu));
  const unsigned read_only = access == Access::read ? cudaHostRegisterReadOnly : 0;
  const cudaError_t status = cudaHostRegister(memory, bytes, cudaHostRegisterPortable | read_only);
  if (status == cudaSuccess) {
    return "";
  }
  cudaGetLastError();
  return fmt::format("the driver refused {}: {}", human_bytes(bytes), cudaGetErrorString(status));
}

void unpin(std::byte* memory, int gpu) noexcept {
  const CurrentGpu current(gpu, std::nothrow);
  ignore(cudaDeviceSynchronize());  // else a pending copy would write to freed memory
  ignore(cudaHostUnregister(memory));
}

void synchronize(StreamHandle stream) { check_cuda(cudaStreamSynchronize(stream), "waiting for a stream"); }

void copy(void* to, const void* from, std::size_t bytes, StreamHandle stream) {
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "copying");
}

void fill(void* to, unsigned char value, std::size_t bytes, StreamHandle stream) {
  check_cuda(cudaMemsetAsync(to, value, bytes, stream), "filling GPU memory");
}

}  // namespace device

namespace {

// A null handle names the default stream of whichever GPU is current.
class OnItsGpu {
 public:
  explicit OnItsGpu(const Stream& stream) {
    if (stream.handle() == nullptr) current_.emplace(stream.gpu());
  }

 private:
  std::optional<CurrentGpu> current_;
};

}  // namespace

Stream::Stream(int gpu, Priority priority) : Stream(nullptr, Destroy{}, gpu) {
  const CurrentGpu current(device::existing(gpu));
  StreamHandle stream = nullptr;
  int lowest = 0, highest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "reading the priorities of streams");
  check_cuda(
      cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority == Priority::high ? highest : lowest),
      "creating a stream");
  handle_.reset(stream);
}

void Stream::Destroy::operator()(StreamHandle stream) const noexcept {
  if (owned) device::ignore(cudaStreamDestroy(stream));
}

void Stream::wait_for(const Event& event) const {
  const OnItsGpu current(*this);
  check_cuda(cudaStreamWaitEvent(handle(), event.handle(), cudaEventWaitDefault), "making a stream wait for an event");
}

void Stream::synchronize() const {
  const OnItsGpu current(*this);
  device::synchronize(handle());
}

Event::Event(int gpu, Timing timing) {
  const CurrentGpu current(device::existing(gpu));
  EventHandle event = nullptr;
  const unsigned flags = cudaEventBlockingSync | (timing == Timing::on ? cudaEventDefault : cudaEventDisableTiming);
  check_cuda(cudaEventCreateWithFlags(&event, flags), "creating an event");
  handle_.reset(event);
}

void Event::Destroy::operator()(EventHandle event) const noexcept { device::ignore(cudaEventDestroy(event)); }

void Event::record(const Stream& stream) const {
  const OnItsGpu current(stream);
  check_cuda(cudaEventRecord(handle(), stream.handle()), "recording an event");
}

bool Event::is_done() const {
  const cudaError_t status = cudaEventQuery(handle());
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check_cuda(status, "querying an event");
  return true;
}

void Event::synchronize() const { check_cuda(cudaEventSynchronize(handle()), "waiting for an event"); }

double Event::seconds_since(const Event& start) const {
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, start.handle(), handle()), "reading the time between events");
  return 1e-3 * static_cast<double>(milliseconds);
}

void copy(void* to, const void* from, std::size_t bytes, const Stream& stream) {
  if (bytes == 0) return;
  const OnItsGpu current(stream);
  device::copy(to, from, bytes, stream.handle());
}

void fill(void* to, unsigned char value, std::size_t bytes, const Stream& stream) {
  if (bytes == 0) return;
  const OnItsGpu current(stream);
  device::fill(to, value, bytes, stream.handle());
}

}  // namespace ballast
