// Makes threads act one after the other, in the order in which their turns were added.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>

namespace ballast {

// Several parties may share it. Each cancels its own turns only.
class Sequencer {
 public:
  class Party {
   private:
    friend Sequencer;
    bool is_cancelled_ = false;  // guarded by the sequencer's mutex
  };
  using Turn = const void*;  // names one; no two that are not over have the same name

  void add(const Party& party, Turn turn) {
    {
      const std::lock_guard lock(mutex_);
      if (!party.is_cancelled_) turns_.push_back({&party, turn});
    }
    changed_.notify_all();
  }

  // Any thread: returns when all turns before this one are over, also if it has not been added yet. Returns false after cancel().
  bool await(const Party& party, Turn turn) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return party.is_cancelled_ || (!turns_.empty() && turns_.front().turn == turn); });
    if (party.is_cancelled_) return false;
    turns_.front().has_begun = true;
    return true;
  }

  // The thread whose turn was awaited.
  void done() {
    {
      const std::lock_guard lock(mutex_);
      turns_.pop_front();
    }
    changed_.notify_all();
  }

  // Any thread: ends the party's waits, because one of its turns will never come. A turn that has begun ends with done().
  void cancel(Party& party) {
    {
      const std::lock_guard lock(mutex_);
      party.is_cancelled_ = true;
      std::erase_if(turns_, [&](const Added& each) { return each.party == &party && !each.has_begun; });
    }
    changed_.notify_all();
  }

 private:
  struct Added {
    const Party* party;
    Turn turn;
    bool has_begun = false;
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Added> turns_;
};

}  // namespace ballast
