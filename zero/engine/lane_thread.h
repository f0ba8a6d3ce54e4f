// A thread that works through a queue.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "offload/completion.h"

namespace ballast {

// Any thread may add. Work is done in the order in which it was added. When a piece fails, those after it are not begun
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

  std::mutex mutex_;  // of the two that follow
  std::deque<Task> tasks_;
  bool ending_ = false;
  std::condition_variable added_;
  std::exception_ptr failed_;  // only its own thread looks at it
  std::thread thread_;
};

}  // namespace ballast
