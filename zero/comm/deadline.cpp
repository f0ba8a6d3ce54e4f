#include "zero/comm/deadline.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <thread>
#include <utility>

namespace ballast {

bool FirstError::set(std::string reason, std::vector<std::size_t> ranks) {
  const std::lock_guard lock(mutex_);
  if (is_set()) return false;
  reason_ = std::move(reason);
  ranks_ = std::move(ranks);
  set_.store(true, std::memory_order_release);
  call_all();
  return true;
}

void FirstError::wake() {
  const std::lock_guard lock(mutex_);
  call_all();
}

void FirstError::call_all() const {
  for (const auto& [owner, call] : calls_) {
    call();
  }
}

std::vector<std::size_t> FirstError::ranks() const { return is_set() ? ranks_ : std::vector<std::size_t>(); }

void FirstError::check() const {
  require(!is_set(), Code::peer_failed, [&] { return Problem{.what = reason_}; });
}

void FirstError::when_set(const void* owner, std::function<void()> call) {
  const std::lock_guard lock(mutex_);
  if (is_set()) call();
  calls_[owner] = std::move(call);
}

void FirstError::forget(const void* owner) {
  const std::lock_guard lock(mutex_);
  calls_.erase(owner);
}

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
