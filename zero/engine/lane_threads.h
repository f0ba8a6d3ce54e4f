// One thread for each lane but the trainer's own, which is `compute`.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "offload/completion.h"
#include "zero/engine/gpu_lanes.h"

namespace ballast {

// A thread that works through a queue. Any thread may add. Work is done in the order in which it was added. When a piece fails, those after it are not begun
// and fail with the same error.
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

// Used by one thread, the trainer's.
class LaneThreads {
 public:
  explicit LaneThreads(const GpuLanes* gpu);  // null: every lane works on the host

  LaneThread& of(Lane lane) { return *threads_[static_cast<std::size_t>(lane)]; }
  void stop();  // finishes what was added to each lane, then ends its thread

 private:
  std::array<std::unique_ptr<LaneThread>, lane_count> threads_;
};

}  // namespace ballast
