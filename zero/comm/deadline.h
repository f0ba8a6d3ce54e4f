// The first error of a job, and waits for peers. A wait ends when they arrive, when the job fails, or at the timeout.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace ballast {

// Any thread may call.
class FirstError {
 public:
  // `ranks` are those that have died, left, not arrived or lost their connection, if the reason names any. False if an error is
  // set already.
  bool set(std::string reason, std::vector<std::size_t> ranks = {});
  bool is_set() const { return set_.load(std::memory_order_acquire); }
  const std::string& reason() const { return reason_; }  // valid once it is set
  std::vector<std::size_t> ranks() const;                // none before it is set
  void check() const;                                    // throws it as B3301

  // Registers a call for waits that cannot poll. The thread that sets the error or calls wake() makes the call, under a
  // lock; if the error is set already, when_set() makes it at once. No call begins after forget().
  void when_set(const void* owner, std::function<void()> call);
  void wake();  // makes the calls for other news, such as a rank that has left
  void forget(const void* owner);

 private:
  void call_all() const;

  std::mutex mutex_;
  std::atomic<bool> set_ = false;
  std::string reason_;  // written once, before set_, as are the ranks
  std::vector<std::size_t> ranks_;
  std::map<const void*, std::function<void()>> calls_;
};

inline constexpr std::chrono::milliseconds default_timeout = std::chrono::minutes(5);
inline constexpr std::chrono::milliseconds longest_timeout =
    std::chrono::years(1);  // no timeout: clocks cannot count much further

std::string seconds(std::chrono::milliseconds time);                            // "0.3 s"
std::string late(std::string_view missing, std::chrono::milliseconds timeout);  // "rank 1 did not arrive within 0.3 s"

// Pauses between attempts, which grow: one that fails at once may succeed soon, and one that has failed for long, later.
class GrowingPause {
 public:
  using Clock = std::chrono::steady_clock;
  void wait(Clock::time_point end);  // not beyond `end`

 private:
  std::chrono::milliseconds next_{20};
};

inline std::chrono::steady_clock::duration left_until(std::chrono::steady_clock::time_point end) {
  return std::max(end - std::chrono::steady_clock::now(), std::chrono::steady_clock::duration::zero());
}

// One wait, which begins at construction. Used by one thread.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  Deadline(FirstError& error, std::chrono::milliseconds timeout)
      : error_(error), timeout_(timeout), end_(Clock::now() + timeout) {}

  // `is_done_within(pause)` waits for as long as `pause` and says whether they have come; `give_up()` throws.
  template <class ComeWithin, class GiveUp>
  void wait(ComeWithin&& is_done_within, GiveUp&& give_up) const {
    while (!is_done_within(pause())) {
      error_.check();
      if (is_over()) give_up();
    }
  }

  bool is_over() const { return Clock::now() >= end_; }

  // Fails the job with B3302.
  [[noreturn]] void fail_late(std::string_view missing) const;

 private:
  // The pause between two checks for a failed job.
  Clock::duration pause() const {
    return std::clamp<Clock::duration>(end_ - Clock::now(), Clock::duration::zero(), std::chrono::milliseconds(20));
  }

  FirstError& error_;
  std::chrono::milliseconds timeout_;
  Clock::time_point end_;
};

}  // namespace ballast
