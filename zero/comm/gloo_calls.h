// Makes calls of Gloo. Where one fails or waits for too long, the error has the reason that the job knows.
#pragma once

#include <gloo/transport/unbound_buffer.h>

#include <chrono>
#include <functional>
#include <mutex>

#include "zero/comm/process_group.h"

namespace ballast {

// One thread calls.
class GlooCalls {
 public:
  explicit GlooCalls(const ProcessGroup& group);
  ~GlooCalls();
  GlooCalls(const GlooCalls&) = delete;
  GlooCalls& operator=(const GlooCalls&) = delete;

  void check() const { error_.check(); }  // throws the job's first error

  // Throws B3301 or B3302 if Gloo fails: it does not tell which rank has died or left.
  void guarded(std::size_t peer, const std::function<void()>& call);

  // Waits for a buffer of this peer. `wait_for` returns false if the wait was aborted.
  void wait(std::size_t peer, gloo::transport::UnboundBuffer& buffer,
            const std::function<bool(std::chrono::milliseconds limit)>& wait_for);

 private:
  void wait_on(gloo::transport::UnboundBuffer* buffer);
  void abort_wait();
  [[noreturn]] void explain(std::size_t peer, const Deadline& deadline, const char* gloo_says);

  ProcessGroup group_;
  FirstError& error_;
  std::mutex mutex_;  // of the member below
  gloo::transport::UnboundBuffer* waiting_ = nullptr;
};

}  // namespace ballast
