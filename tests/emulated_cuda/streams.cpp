#include "tests/emulated_cuda/streams.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <vector>

#include "tests/emulated_cuda/calls.h"
#include "tests/emulated_cuda/devices.h"
#include "tests/emulated_cuda/rules.h"

namespace emulated {
namespace {

std::mutex mutex;  // guards the variables below
auto& streams = never_destroyed<std::map<cudaStream_t, std::shared_ptr<CUstream_st>>>();
auto& destroyed = never_destroyed<std::vector<std::shared_ptr<CUstream_st>>>();  // those whose work may not have ended
NcclClock host_clock{};

// Destroys what has ended since the last call.
void end_destroyed_streams() {
  std::vector<std::shared_ptr<CUstream_st>> ended;
  const std::lock_guard lock(mutex);
  for (auto& stream : destroyed) {
    if (stream->queue.is_idle()) ended.push_back(std::move(stream));
  }
  std::erase(destroyed, nullptr);
}

std::vector<std::shared_ptr<CUstream_st>> all_of(int gpu) {
  std::vector<std::shared_ptr<CUstream_st>> all;
  const std::lock_guard lock(mutex);
  for (const auto& [handle, stream] : streams) {
    if (stream->gpu == gpu) all.push_back(stream);
  }
  for (const auto& stream : destroyed) {
    if (stream->gpu == gpu) all.push_back(stream);
  }
  return all;
}

void wait_for(CUstream_st& stream) {
  NcclClock clock{};
  {
    const std::lock_guard lock(stream.mutex);
    clock = stream.clock;
  }
  stream.queue.wait();
  is_known_to_host(clock);
}

}  // namespace

Queue::Queue() : random_(static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(this) / 64)) {
  thread_ = std::thread([this] { run(); });
}

Queue::~Queue() {
  end();
  thread_.join();
}

void Queue::add(Work work) {
  {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    ++added_;
  }
  has_work_.notify_one();
}

bool Queue::is_idle() {
  const std::lock_guard lock(mutex_);
  return done_ == added_;
}

void Queue::wait() {
  std::unique_lock lock(mutex_);
  const std::uint64_t last = added_;
  while (done_ < last) {
    waited_for_ = done_ < waited_for_ ? std::min(waited_for_, last) : last;
    is_done_.wait(lock);
  }
}

void Queue::end() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  has_work_.notify_one();
}

void Queue::run() {
  while (true) {
    Work work;
    {
      std::unique_lock lock(mutex_);
      has_work_.wait(lock, [this] { return ending_ || !work_.empty(); });
      if (work_.empty()) return;
      work = std::move(work_.front());
      work_.pop_front();
    }
    be_late();
    work();
    work = nullptr;
    std::unique_lock lock(mutex_);
    const bool ends_a_wait = ++done_ == waited_for_;
    lock.unlock();
    if (ends_a_wait) is_done_.notify_all();
  }
}

void Queue::be_late() {
  if (random_() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 100));
}

CUstream_st& stream_of(cudaStream_t handle) {
  if (handle == nullptr) return device(current_gpu()).null_stream;
  const std::lock_guard lock(mutex);
  if (!streams.contains(handle)) broken("streams live while they are used", "a call names one that was destroyed");
  return *handle;
}

void wait_for_all_streams_of(int gpu) {
  for (Device* const device : devices_with_context()) {
    if (device->gpu == gpu) wait_for(device->null_stream);
  }
  for (const auto& stream : all_of(gpu)) {
    wait_for(*stream);
  }
  end_destroyed_streams();
}

void is_known_to_host(const NcclClock& clock) {
  const std::lock_guard lock(mutex);
  advance(host_clock, clock);
}

NcclClock known_to_host() {
  const std::lock_guard lock(mutex);
  return host_clock;
}

std::size_t live_streams() {
  std::vector<std::shared_ptr<CUstream_st>> ended;  // their threads end with the work that they have
  {
    const std::lock_guard lock(mutex);
    ended.swap(destroyed);
  }
  ended.clear();
  const std::lock_guard lock(mutex);
  return streams.size();
}

}  // namespace emulated

using emulated::call;
using emulated::Context;
using emulated::stream_of;

// Nothing is captured.
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return call("cudaThreadExchangeStreamCaptureMode", Context::none, [] { return cudaSuccess; });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  return call("cudaDeviceGetStreamPriorityRange", Context::on_current, [&] {
    *lowest = 0;
    *highest = -5;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

// Priorities change no order that is promised.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return call("cudaStreamCreateWithPriority", Context::on_current, [&] {
    if (flags != cudaStreamNonBlocking) return cudaErrorInvalidValue;  // the others are not emulated
    emulated::end_destroyed_streams();
    auto made = std::make_shared<CUstream_st>(emulated::current_gpu());
    *stream = made.get();
    const std::lock_guard lock(emulated::mutex);
    emulated::streams[*stream] = std::move(made);
    return cudaSuccess;
  });
}

// The stream's work goes on.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return emulated::releasing_call("cudaStreamDestroy", [&] {
    const std::lock_guard lock(emulated::mutex);
    const auto found = emulated::streams.find(stream);
    if (found == emulated::streams.end()) return cudaErrorInvalidResourceHandle;
    stream->queue.end();
    emulated::destroyed.push_back(std::move(found->second));
    emulated::streams.erase(found);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return emulated::releasing_call("cudaStreamSynchronize", [&] {
    emulated::wait_for(stream_of(stream));
    return cudaSuccess;
  });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return call("cudaStreamQuery", Context::on_current,
              [&] { return stream_of(stream).queue.is_idle() ? cudaSuccess : cudaErrorNotReady; });
}
