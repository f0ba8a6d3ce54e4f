// The one future of the library: something that is under way and will be done, or will fail, exactly once.
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <vector>

#include "kernels/runtime/stream.h"

namespace ballast::offload {

// A value: copies wait for the same thing. Any thread may ask and wait.
class Completion {
 public:
  Completion() = default;                             // done already
  explicit Completion(std::shared_ptr<Event> event);  // done when the GPU gets there

  bool is_done() const;                                    // failed counts as done
  void wait() const;                                       // throws what it failed with
  bool wait_for(std::chrono::nanoseconds patience) const;  // false: not done yet

  // Later work in the stream starts after this. The GPU waits for an event; for the host the calling thread waits.
  void order(const Stream& stream) const;

 private:
  friend class Promise;
  struct State;

  std::shared_ptr<State> state_;
  std::shared_ptr<Event> event_;
};

// Several at once. It ends only when all of them have: memory that they use is declared before it, and so outlives them.
class InFlight {
 public:
  InFlight() = default;
  InFlight(InFlight&&) = delete;
  ~InFlight();  // passes over what failed

  void add(Completion completion) { completions_.push_back(std::move(completion)); }
  void wait();  // for all, then throws what the first failed one failed with

 private:
  std::vector<Completion> completions_;
};

// The end that has to keep it. One that is dropped fails, so that nobody waits for ever.
class Promise {
 public:
  Promise();
  Promise(Promise&&) noexcept = default;
  Promise& operator=(Promise&&) = delete;
  ~Promise();

  Completion completion() const;

  // One of the two, once.
  void finish() { end(nullptr); }
  void fail(std::exception_ptr error) { end(std::move(error)); }

 private:
  void end(std::exception_ptr error);

  std::shared_ptr<Completion::State> state_;
};

}  // namespace ballast::offload
