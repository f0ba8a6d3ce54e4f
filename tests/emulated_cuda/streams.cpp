#include "tests/emulated_cuda/streams.h"

#include <execinfo.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <vector>

#include "kernels/runtime/environment.h"
#include "tests/emulated_cuda/calls.h"
#include "tests/emulated_cuda/devices.h"
#include "tests/emulated_cuda/host_accesses.h"
#include "tests/emulated_cuda/kernel_accesses.h"
#include "tests/emulated_cuda/pinned_memory.h"
#include "tests/emulated_cuda/rules.h"

namespace emulated {
namespace {

std::mutex mutex;  // guards the variables below
auto& streams = never_destroyed<std::map<cudaStream_t, std::shared_ptr<CUstream_st>>>();
auto& destroyed = never_destroyed<std::vector<std::shared_ptr<CUstream_st>>>();  // those whose work may not have ended
auto& host_clock = never_destroyed<Clock>();
auto& last_issued = never_destroyed<std::vector<std::uint64_t>>();  // of each index of streams, the last work so far
auto& free_indices = never_destroyed<std::vector<std::size_t>>();

// An index is used again if the host knows that all work of its former stream has ended: clocks cannot tell the two apart.
std::size_t take_index() {
  const std::lock_guard lock(mutex);
  for (std::size_t& index : free_indices) {
    if (host_clock.of(index) < last_issued[index]) continue;
    std::swap(index, free_indices.back());
    const std::size_t taken = free_indices.back();
    free_indices.pop_back();
    return taken;
  }
  last_issued.push_back(0);
  return last_issued.size() - 1;
}

std::uint64_t last_issued_of(std::size_t index) {
  const std::lock_guard lock(mutex);
  return last_issued[index];
}

void give_index_back(std::size_t index, std::uint64_t issued) {
  const std::lock_guard lock(mutex);
  last_issued[index] = issued;
  free_indices.push_back(index);
}

// EMULATED_CUDA_CALLERS=1 remembers who issued each work, so that a broken rule can tell.
std::vector<void*> callers() {
  static const bool are_wanted = ballast::Environment().integer("EMULATED_CUDA_CALLERS").value_or(0) != 0;
  if (!are_wanted) return {};
  std::array<void*, 24> frames{};
  const int count = ::backtrace(frames.data(), frames.size());
  return std::vector<void*>(frames.begin(), frames.begin() + count);
}

Schedule& schedule() {
  static Schedule chosen{.lazy = ballast::Environment().integer("EMULATED_CUDA_LAZY_STREAMS").value_or(0) != 0};
  return chosen;
}

// Destroys what has ended since the last call.
void end_destroyed_streams() {
  std::vector<std::shared_ptr<CUstream_st>> ended;
  const std::lock_guard lock(mutex);
  for (auto& stream : destroyed) {
    if (stream->queue->is_idle()) ended.push_back(std::move(stream));
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

}  // namespace

void set_schedule(const Schedule& wanted) { schedule() = wanted; }

bool is_forgotten_wait() {
  static std::atomic<std::size_t> waits = 0;
  return ++waits == schedule().forgotten_wait;
}

Queue::Queue() : random_(static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(this) / 64) + schedule().seed) {
  thread_ = std::thread([this] { run(); });
}

Queue::~Queue() {
  end();
  thread_.join();
}

std::uint64_t Queue::add(Work work) {
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    number = ++added_;
    if (!schedule().lazy) wanted_ = number;
  }
  has_work_.notify_one();
  return number;
}

void Queue::want(std::uint64_t number) {
  {
    const std::lock_guard lock(mutex_);
    if (number <= wanted_) return;
    wanted_ = number;
  }
  has_work_.notify_one();
}

bool Queue::is_idle() {
  std::uint64_t all = 0;
  {
    const std::lock_guard lock(mutex_);
    if (done_ == added_) return true;
    all = added_;
  }
  want(all);
  return false;
}

void Queue::wait() {
  std::unique_lock lock(mutex_);
  const std::uint64_t last = added_;
  wanted_ = last;
  has_work_.notify_one();
  while (done_ < last) {
    waited_for_ = done_ < waited_for_ ? std::min(waited_for_, last) : last;
    is_done_.wait(lock);
  }
}

void Queue::end() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    wanted_ = added_;
  }
  has_work_.notify_one();
}

void Queue::run() {
  while (true) {
    Work work;
    {
      std::unique_lock lock(mutex_);
      has_work_.wait(lock, [this] { return done_ < wanted_ || (ending_ && work_.empty()); });
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

}  // namespace emulated

CUstream_st::CUstream_st(int on_gpu)
    : gpu(on_gpu), index_(emulated::take_index()), issued_(emulated::last_issued_of(index_)) {}

CUstream_st::~CUstream_st() { emulated::give_index_back(index_, issued_); }

emulated::IssuedPtr CUstream_st::issue(const char* call, std::vector<emulated::Access> accesses, emulated::Work work) {
  const std::lock_guard lock(mutex_);
  clock_.advance(emulated::known_to_host());
  clock_.advance(index_, ++issued_);
  const auto issued =
      std::make_shared<const emulated::Issued>(emulated::Issued{call, index_, issued_, clock_, emulated::callers()});
  for (const emulated::Access& access : accesses) {
    if (emulated::is_pinned(access.memory, access.bytes)) emulated::keep_host_out(access, issued);
  }
  queue->add([issued, accesses = std::move(accesses), work = std::move(work)] {
    if (emulated::context_has_failed()) return;
    emulated::note_accesses(accesses, issued);
    const emulated::KernelAccesses recorded;
    work();
    emulated::note_accesses(recorded.ranges(), issued);
  });
  return issued;
}

void CUstream_st::follow(const emulated::Clock& others) {
  const std::lock_guard lock(mutex_);
  clock_.advance(others);
}

emulated::Clock CUstream_st::clock() {
  const std::lock_guard lock(mutex_);
  clock_.advance(emulated::known_to_host());
  return clock_;
}

void CUstream_st::wait() {
  const emulated::Clock ended = clock();
  queue->wait();
  emulated::is_known_to_host(ended);
}

namespace emulated {

CUstream_st& stream_of(cudaStream_t handle) {
  if (handle == nullptr) return device(current_gpu()).null_stream;
  const std::lock_guard lock(mutex);
  if (!streams.contains(handle)) broken("streams live while they are used", "a call names one that was destroyed");
  return *handle;
}

void wait_for_all_streams_of(int gpu) {
  for (Device* const device : devices_with_context()) {
    if (device->gpu == gpu) device->null_stream.wait();
  }
  for (const auto& stream : all_of(gpu)) {
    stream->wait();
  }
  end_destroyed_streams();
}

void is_known_to_host(const Clock& ended) {
  {
    const std::lock_guard lock(mutex);
    host_clock.advance(ended);
  }
  let_host_in(ended);
}

Clock known_to_host() {
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
    stream->queue->end();
    emulated::destroyed.push_back(std::move(found->second));
    emulated::streams.erase(found);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return emulated::releasing_call("cudaStreamSynchronize", [&] {
    stream_of(stream).wait();
    return cudaSuccess;
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return call("cudaStreamQuery", Context::on_current, [&] {
    CUstream_st& stream = stream_of(handle);
    const emulated::Clock ended = stream.clock();
    if (!stream.queue->is_idle()) return cudaErrorNotReady;
    emulated::is_known_to_host(ended);
    return cudaSuccess;
  });
}
