// Whose turn it is among threads that must do something in one order.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace ballast {

class Turns {
 public:
  std::size_t draw() { return drawn_++; }  // in the order that is to be kept; one thread at a time

  void await(std::size_t turn) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return given_up_ || now_ == turn; });
  }
  void end() {  // of the turn that was awaited
    {
      const std::lock_guard lock(mutex_);
      ++now_;
    }
    changed_.notify_all();
  }
  void give_up() {  // nobody waits any more: those who have not come will not come
    {
      const std::lock_guard lock(mutex_);
      given_up_ = true;
    }
    changed_.notify_all();
  }

 private:
  std::size_t drawn_ = 0;
  std::mutex mutex_;  // of the two that follow
  std::size_t now_ = 0;
  bool given_up_ = false;
  std::condition_variable changed_;
};

}  // namespace ballast
