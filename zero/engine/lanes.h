// What runs a lane: a thread of its own, and a stream if the lane works on a GPU.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "kernels/backend.h"
#include "kernels/runtime/machine.h"
#include "kernels/runtime/stream.h"
#include "kernels/runtime/system_resources.h"
#include "offload/completion.h"
#include "zero/plan/program.h"

namespace ballast {

inline bool works_on_device(Lane lane) {  // if there is a GPU
  switch (lane) {
    case Lane::gather:
    case Lane::reduce:
    case Lane::upload:
    case Lane::download:
    case Lane::update: return true;
    case Lane::compute:
    case Lane::host:
    case Lane::disk:
    case Lane::fetch: return false;
  }
  return false;
}

// A GPU's streams, one for each lane that works there. Outlives everything that issues work into its streams, such as
// communicators.
class GpuLanes {
 public:
  explicit GpuLanes(int gpu = 0) : gpu_(gpu) {  // B2101 or B2102 without a GPU
    for (std::size_t lane = 0; lane < lane_count; ++lane) {
      if (!works_on_device(static_cast<Lane>(lane))) continue;
      Stream stream(gpu, lets_ranks_wait(static_cast<Lane>(lane)) ? Stream::Priority::high : Stream::Priority::normal);
      auto backend = kernels::cuda_backend(stream.handle(), gpu);
      lanes_[lane] = OnGpu{std::move(stream), std::move(backend)};
    }
  }

  int gpu() const { return gpu_; }
  const Stream& stream(Lane lane) const { return of(lane).stream; }
  kernels::Backend& backend(Lane lane) const { return *of(lane).backend; }

  void finish() const {  // waits for everything that was issued
    for (const std::optional<OnGpu>& lane : lanes_) {
      if (lane) lane->stream.synchronize();
    }
  }

 private:
  // Other ranks wait for its work.
  static bool lets_ranks_wait(Lane lane) { return lane == Lane::gather || lane == Lane::reduce; }

  struct OnGpu {
    Stream stream;
    std::unique_ptr<kernels::Backend> backend;
  };
  const OnGpu& of(Lane lane) const { return *lanes_[static_cast<std::size_t>(lane)]; }

  int gpu_;
  std::array<std::optional<OnGpu>, lane_count> lanes_;
};

// A thread that works through a queue. Any thread may add. Work is done in the order in which it was added. When a piece
// fails, those after it are not begun and fail with the same error.
class LaneThread {
 public:
  LaneThread() : thread_(start_thread("a lane of the engine", [this] { run(); })) {}
  LaneThread(LaneThread&&) = delete;

  ~LaneThread() {  // finishes what was added
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    added_.notify_one();
    thread_.join();
  }

  offload::Completion add(std::function<void()> work) {
    Task task{std::move(work), {}};
    offload::Completion completion = task.promise.completion();
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    added_.notify_one();
    return completion;
  }

 private:
  struct Task {
    std::function<void()> work;
    offload::Promise promise;
  };

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      added_.wait(lock, [&] { return ending_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      {
        Task task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        finish(task);
      }
      lock.lock();
    }
  }

  void finish(Task& task) {
    try {
      if (failed_) std::rethrow_exception(failed_);
      task.work();
    } catch (...) {
      failed_ = std::current_exception();
      task.promise.fail(failed_);
      return;
    }
    task.promise.finish();
  }

  std::mutex mutex_;  // guards the two that follow
  std::deque<Task> tasks_;
  bool ending_ = false;
  std::condition_variable added_;
  std::exception_ptr failed_;  // only its own thread looks at it
  std::thread thread_;
};

// One thread for each lane but the trainer's own, which is `compute`. Used by the trainer's thread.
class LaneThreads {
 public:
  explicit LaneThreads(const GpuLanes* gpu) {  // null: every lane works on the host
    for (std::size_t i = 0; i < lane_count; ++i) {
      const Lane lane = static_cast<Lane>(i);
      if (lane == Lane::compute) continue;
      threads_[i] = std::make_unique<LaneThread>();
      if (moves_data(lane)) threads_[i]->add(use_short_time_slices).wait();
      if (gpu != nullptr) {  // also for lanes of the host: they wait for events, which CUDA does on the current GPU
        threads_[i]->add([number = gpu->gpu()] { device::choose_gpu(number); }).wait();
      }
    }
  }

  LaneThread& of(Lane lane) { return *threads_[static_cast<std::size_t>(lane)]; }

  void stop() {  // ends each thread after the work that was added to its lane
    for (std::unique_ptr<LaneThread>& thread : threads_) {
      thread.reset();
    }
  }

 private:
  static bool moves_data(Lane lane) { return lane != Lane::compute && lane != Lane::update && lane != Lane::host; }

  std::array<std::unique_ptr<LaneThread>, lane_count> threads_;
};

}  // namespace ballast
