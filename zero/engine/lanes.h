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
#include "kernels/runtime/stream.h"
#include "offload/completion.h"
#include "zero/plan/program.h"

namespace ballast {

bool works_on_device(Lane lane);  // if there is a GPU

// A GPU's streams, one for each lane that works there. Outlives everything that issues work into its streams, such as
// communicators.
class GpuLanes {
 public:
  explicit GpuLanes(int gpu = 0);  // B2101 or B2102 without a GPU

  int gpu() const { return gpu_; }
  const Stream& stream(Lane lane) const { return of(lane).stream; }
  kernels::Backend& backend(Lane lane) const { return *of(lane).backend; }
  void finish() const;  // waits for everything that was issued

 private:
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
  LaneThread();
  LaneThread(LaneThread&&) = delete;
  ~LaneThread();  // finishes what was added

  offload::Completion add(std::function<void()> work);

 private:
  struct Task {
    std::function<void()> work;
    offload::Promise promise;
  };
  void run();
  void finish(Task& task);

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
  explicit LaneThreads(const GpuLanes* gpu);  // null: every lane works on the host

  LaneThread& of(Lane lane) { return *threads_[static_cast<std::size_t>(lane)]; }
  void stop();  // finishes what was added to each lane, then ends its thread

 private:
  std::array<std::unique_ptr<LaneThread>, lane_count> threads_;
};

}  // namespace ballast
