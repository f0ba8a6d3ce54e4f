#include "zero/comm/first_error.h"

#include <ballast/error.h>

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

}  // namespace ballast
