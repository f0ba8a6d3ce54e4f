// A counter in shared memory that one process advances and others wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace ballast {

// Counts wrap around; compared counts differ by less than 2^31.
class Progress {
 public:
  void advance();
  bool has_reached(std::uint32_t count) const {
    return static_cast<std::int32_t>(count_.load(std::memory_order_acquire) - count) >= 0;
  }
  // Sleeps for up to about `pause`; returns whether the count is reached.
  bool wait_for(std::uint32_t count, std::chrono::nanoseconds pause);

 private:
  std::atomic<std::uint32_t> count_ = 0;
  std::atomic<std::uint32_t> sleepers_ = 0;  // 0: no wake-up is needed. A killed sleeper stays counted
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "atomics in shared memory must be lock-free");

}  // namespace ballast
