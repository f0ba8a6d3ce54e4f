// Finds NCCL work that waits too long for peers.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "kernels/runtime/stream.h"
#include "zero/comm/channel.h"
#include "zero/comm/deadline.h"

namespace ballast {

// A thread of its own watches the work, because the threads that need it wait for the stream without a timeout. When
// work is late, or the GPU has failed, the thread sets the job's error. One thread at a time issues.
class NcclWatch {
 public:
  NcclWatch(FirstError& error, std::chrono::milliseconds timeout, const GpuStream& stream);
  ~NcclWatch();
  NcclWatch(const NcclWatch&) = delete;
  NcclWatch& operator=(const NcclWatch&) = delete;

  // Calls `issue`, which adds work to the stream, and watches both: the call may wait for peers, too.
  void watch(const std::function<void()>& issue);

 private:
  using Clock = std::chrono::steady_clock;
  struct Work {
    std::optional<Event> end;  // missing while it is being issued
    Clock::time_point since;
  };

  void run();
  bool is_late();
  void drop_ended_work();
  Event unused_event();

  FirstError& error_;
  std::chrono::milliseconds timeout_;
  Stream stream_;
  std::mutex mutex_;  // guards the members below, except for the thread
  std::deque<Work> under_way_;
  std::vector<Event> unused_;
  bool ending_ = false;
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace ballast
