#include "zero/comm/deadline.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <thread>

namespace ballast {

std::string seconds(std::chrono::milliseconds time) {
  return fmt::format("{} s", std::chrono::duration<double>(time).count());
}

std::string late(std::string_view missing, std::chrono::milliseconds timeout) {
  return fmt::format("{} did not arrive within {}", missing, seconds(timeout));
}

void GrowingPause::wait(Clock::time_point end) {
  constexpr std::chrono::milliseconds longest = std::chrono::seconds(1);
  std::this_thread::sleep_for(std::min<Clock::duration>(next_, left_until(end)));
  next_ = std::min(2 * next_, longest);
}

void Deadline::fail_late(std::string_view missing) const {
  const std::string what = late(missing, timeout_);
  error_.set(what);
  fail(Code::peer_late, {.what = what});
}

}  // namespace ballast
