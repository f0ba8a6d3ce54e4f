// A count in shared memory that one process advances and others wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace ballast {

// Counts wrap around; those that are compared are near each other.
class Progress {
 public:
  void advance();
  bool has_come_to(std::uint32_t count) const {
    return static_cast<std::int32_t>(count_.load(std::memory_order_acquire) - count) >= 0;
  }
  // Sleeps for about `pause` at most; says whether it has come.
  bool wait_for(std::uint32_t count, std::chrono::nanoseconds pause);

 private:
  std::atomic<std::uint32_t> count_ = 0;
  std::atomic<std::uint32_t> sleepers_ = 0;  // so that nobody is woken for nothing. One that was killed stays in it
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "atomics in shared memory must be lock-free");

}  // namespace ballast
