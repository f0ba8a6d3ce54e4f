// Finds NCCL work that waits too long for peers.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "kernels/runtime/stream.h"
#include "zero/comm/channel.h"
#include "zero/comm/process_group.h"

namespace ballast {

// A thread of its own watches the work, because the threads that need it wait for the stream without a timeout. When
// work is late, waits for a rank that has left, or NCCL or the GPU has failed, the thread sets the job's error. One thread at
// a time issues.
class NcclWatch {
 public:
  // `check` throws the error of work that NCCL has issued, if there is one. The thread calls it while work waits.
  NcclWatch(const ProcessGroup& group, const GpuStream& stream, std::function<void()> check);
  ~NcclWatch();
  NcclWatch(const NcclWatch&) = delete;
  NcclWatch& operator=(const NcclWatch&) = delete;

  // Calls `issue`, which adds work to the stream, and watches both: the call may wait for peers, too.
  void watch(const std::function<void()>& issue);

 private:
  using Clock = std::chrono::steady_clock;

  void set_issuing(std::optional<Clock::time_point> since);  // null: no longer
  void run();
  bool is_late();
  bool has_waited_too_long();
  std::optional<Clock::time_point> issuing_since();
  bool take_more_work();
  void require_all_ranks(Clock::duration waited) const;

  ProcessGroup group_;
  std::function<void()> check_;
  Stream stream_;
  Event end_;                                       // of the work that is watched; used by the thread only
  std::optional<Clock::time_point> watched_since_;  // likewise
  std::mutex mutex_;                                // guards the members below
  std::optional<Clock::time_point> issuing_since_;
  bool has_more_work_ = false;  // than what is watched
  bool ending_ = false;
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace ballast
