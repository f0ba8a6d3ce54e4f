#include "zero/comm/first_error.h"

#include <chrono>
#include <thread>
#include <utility>

#include "kernels/runtime/error.h"

namespace ballast {

bool FirstError::set(std::string reason) {
  const std::lock_guard lock(mutex_);
  if (is_set()) return false;
  reason_ = std::move(reason);
  set_.store(true, std::memory_order_release);
  for (const auto& [owner, call] : calls_) {
    call();
  }
  return true;
}

void FirstError::check() const {
  require(!is_set(), Code::peer_failed, [&] { return Problem{.what = reason_}; });
}

void FirstError::learn() const {
  constexpr auto pause = std::chrono::milliseconds(5);
  for (auto waited = pause; waited < std::chrono::seconds(2) && !is_set(); waited += pause) {
    std::this_thread::sleep_for(pause);
  }
  check();
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

}  // namespace ballast
