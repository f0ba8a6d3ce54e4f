#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <set>

#include "tests/emulated_cuda/calls.h"
#include "tests/emulated_cuda/devices.h"
#include "tests/emulated_cuda/live.h"
#include "tests/emulated_cuda/rules.h"

namespace {

using Time = std::chrono::steady_clock;

// A mark in a stream.
struct Record {
  std::promise<Time::time_point> promise{};
  std::shared_future<Time::time_point> time = promise.get_future().share();
  emulated::Clock ended{};  // what has ended when the stream has reached it
  std::weak_ptr<emulated::Queue> queue{};
  std::uint64_t number = 0;  // in the queue

  bool is_done() const { return time.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  void want() const {
    if (const auto marked = queue.lock()) marked->want(number);
  }
  void wait() const {
    want();
    time.wait();
  }
};

}  // namespace

struct CUevent_st {
  int gpu = 0;
  bool timed = false;
  std::mutex mutex{};  // guards the record
  std::shared_ptr<Record> record{};

  std::shared_ptr<Record> newest() {
    const std::lock_guard lock(mutex);
    return record;
  }
};

namespace emulated {
namespace {

std::mutex mutex;  // guards the set
auto& events = never_destroyed<std::set<CUevent_st*>>();

CUevent_st& event_of(cudaEvent_t handle) {
  const std::lock_guard lock(mutex);
  if (!events.contains(handle)) broken("events live while they are used", "a call names one that was destroyed");
  return *handle;
}

}  // namespace

std::size_t live_events() {
  const std::lock_guard lock(mutex);
  return events.size();
}

}  // namespace emulated

using emulated::call;
using emulated::Context;
using emulated::event_of;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call("cudaEventCreateWithFlags", Context::on_current, [&] {
    *event = new CUevent_st{.gpu = emulated::current_gpu(), .timed = (flags & cudaEventDisableTiming) == 0};
    const std::lock_guard lock(emulated::mutex);
    emulated::events.insert(*event);
    return cudaSuccess;
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return emulated::releasing_call("cudaEventDestroy", [&] {
    {
      const std::lock_guard lock(emulated::mutex);
      if (emulated::events.erase(event) == 0) return cudaErrorInvalidResourceHandle;
    }
    delete event;
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call("cudaEventRecord", Context::on_current, [&] {
    CUstream_st& marked = emulated::stream_of(stream);
    CUevent_st& recorded = event_of(event);
    if (recorded.gpu != marked.gpu) return cudaErrorInvalidResourceHandle;
    auto record = std::make_shared<Record>();
    record->ended = marked.clock();
    record->queue = marked.queue;
    record->number = marked.add([record] { record->promise.set_value(Time::now()); });
    const std::lock_guard lock(recorded.mutex);
    recorded.record = std::move(record);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return call("cudaStreamWaitEvent", Context::on_current, [&] {
    const std::shared_ptr<Record> record = event_of(event).newest();
    if (record == nullptr) return cudaSuccess;
    if (emulated::is_forgotten_wait()) return cudaSuccess;
    CUstream_st& waiting = emulated::stream_of(stream);
    waiting.follow(record->ended);
    waiting.add([record] { record->wait(); });
    return cudaSuccess;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return emulated::releasing_call("cudaEventSynchronize", [&] {
    if (const std::shared_ptr<Record> record = event_of(event).newest()) {
      record->wait();
      emulated::is_known_to_host(record->ended);
    }
    return cudaSuccess;
  });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return call("cudaEventQuery", Context::on_current, [&] {
    const std::shared_ptr<Record> record = event_of(event).newest();
    if (record == nullptr) return cudaSuccess;
    if (!record->is_done()) {
      record->want();
      return cudaErrorNotReady;
    }
    emulated::is_known_to_host(record->ended);
    return cudaSuccess;
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return call("cudaEventElapsedTime", Context::on_current, [&] {
    CUevent_st &first = event_of(start), &last = event_of(end);
    const std::shared_ptr<Record> began = first.newest(), ended = last.newest();
    if (!first.timed || !last.timed || first.gpu != last.gpu || began == nullptr || ended == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (!began->is_done() || !ended->is_done()) return cudaErrorNotReady;
    *milliseconds = std::chrono::duration<float, std::milli>(ended->time.get() - began->time.get()).count();
    return cudaSuccess;
  });
}
