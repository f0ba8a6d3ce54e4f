// Refuses calls of another thread while one runs: Python's lock is released meanwhile. A child of fork(), which has none of the
// library's threads, is refused at any time.
#pragma once

#include <ballast/error.h>

#include <fmt/format.h>
#include <pthread.h>

#include <atomic>
#include <thread>

namespace ballast::python {

// The number of times that this process and its ancestors were forked, since the first call.
inline unsigned forks() {
  static std::atomic<unsigned> count = 0;
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++count; });
  static_cast<void>(registered);
  return count;
}

class OneThread {
 public:
  explicit OneThread(const char* what) : what_(what) {}

  // The thread may call again inside of its call, as a callback does.
  class Call {
   public:
    explicit Call(const OneThread& of) : of_(of), is_inner_(of.caller_ == std::this_thread::get_id()) {
      of.require_this_process();
      std::thread::id none;
      require(
          is_inner_ || of.caller_.compare_exchange_strong(none, std::this_thread::get_id()), Code::out_of_order, [&] {
            return Problem{
                .what = fmt::format("cannot use {}: another thread is in a call of it", of.what_),
                .needed = "calls of one thread at a time",
                .remedy = "Make all calls of an optimizer and its model from one thread, or hold a lock around them."};
          });
    }
    ~Call() {
      if (!is_inner_) of_.caller_ = std::thread::id();
    }
    Call(const Call&) = delete;

   private:
    const OneThread& of_;
    bool is_inner_;
  };

 private:
  void require_this_process() const {
    require(forks_ == forks(), Code::unsupported, [&] {
      return Problem{.what = fmt::format("cannot use {}: this process is a fork of a rank, and no rank itself", what_),
                     .remedy = "Train in the process that has called ballast.wrap()."};
    });
  }

  const char* what_;
  unsigned forks_ = forks();
  mutable std::atomic<std::thread::id> caller_{};
};

}  // namespace ballast::python
