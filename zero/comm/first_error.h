// The first error of a job. Later errors are its consequences, and are dropped.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace ballast {

// Any thread may call.
class FirstError {
 public:
  // `ranks` are those that have died, left, not arrived or lost their connection, if the reason names any. False if an error is set already.
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

}  // namespace ballast
