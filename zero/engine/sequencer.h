// Makes threads act in the order in which they got their tickets.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace ballast {

class Sequencer {
 public:
  // Called by one thread at a time, in the wanted order.
  std::size_t next_ticket() { return tickets_++; }

  // Any thread: returns when every earlier ticket is done, or after cancel().
  void await(std::size_t ticket) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return cancelled_ || current_ == ticket; });
  }

  // The thread whose ticket was awaited.
  void done() {
    {
      const std::lock_guard lock(mutex_);
      ++current_;
    }
    changed_.notify_all();
  }

  // Any thread: ends all waits, because an earlier ticket will never be done.
  void cancel() {
    {
      const std::lock_guard lock(mutex_);
      cancelled_ = true;
    }
    changed_.notify_all();
  }

 private:
  std::size_t tickets_ = 0;
  std::mutex mutex_;  // of the two that follow
  std::size_t current_ = 0;
  bool cancelled_ = false;
  std::condition_variable changed_;
};

}  // namespace ballast
