// How long a rank waits for its peers: until they come, until the group has failed, or until its time is up.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>
#include <string_view>

#include "zero/comm/first_error.h"

namespace ballast {

inline constexpr std::chrono::milliseconds default_timeout = std::chrono::minutes(5);

std::string seconds(std::chrono::milliseconds time);                            // "0.3 s"
std::string late(std::string_view missing, std::chrono::milliseconds timeout);  // "rank 1 did not arrive within 0.3 s"

// Of one wait: made when it begins.
class Patience {
 public:
  using Clock = std::chrono::steady_clock;

  Patience(FirstError& error, std::chrono::milliseconds timeout)
      : error_(error), timeout_(timeout), end_(Clock::now() + timeout) {}

  // `come_within(pause)` waits for as long as `pause` and says whether they have come; `give_up()` throws.
  template <class ComeWithin, class GiveUp>
  void wait(ComeWithin&& come_within, GiveUp&& give_up) const {
    while (!come_within(pause())) {
      error_.check();
      if (is_over()) give_up();
    }
  }

  bool is_over() const { return Clock::now() >= end_; }

  // B3302. The group has failed then.
  [[noreturn]] void blame(std::string_view missing) const;

 private:
  // So often is it looked whether the group has failed.
  Clock::duration pause() const {
    return std::clamp<Clock::duration>(end_ - Clock::now(), Clock::duration::zero(), std::chrono::milliseconds(20));
  }

  FirstError& error_;
  std::chrono::milliseconds timeout_;
  Clock::time_point end_;
};

}  // namespace ballast
