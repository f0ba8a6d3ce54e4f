// Why a group of ranks cannot go on. The first reason counts; those that follow from it are not heard.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace ballast {

// Any thread may call.
class FirstError {
 public:
  bool set(std::string reason);  // false if there was one
  bool is_set() const { return set_.load(std::memory_order_acquire); }
  const std::string& reason() const { return reason_; }  // once it is set
  void check() const;                                    // throws it as B3301

  // For waits that cannot look now and then. Called by the thread that sets it, or at once, and by wake(); no more after
  // forget().
  void when_set(const void* owner, std::function<void()> call);
  void wake();  // there is other news: a rank has left
  void forget(const void* owner);

 private:
  void call_all() const;

  std::mutex mutex_;
  std::atomic<bool> set_ = false;
  std::string reason_;  // written once, before set_
  std::map<const void*, std::function<void()>> calls_;
};

}  // namespace ballast
