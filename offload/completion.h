// The library's only future: an operation that ends exactly once, with success or with an error.
#pragma once

#include <ballast/log.h>

#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "kernels/runtime/stream.h"

namespace ballast::offload {

// A value: copies refer to the same operation. Any thread may query and wait.
class Completion {
 public:
  Completion() = default;                             // has ended
  explicit Completion(std::shared_ptr<Event> event);  // ends when the GPU reaches the event

  bool is_done() const;                                   // true after a failure, too
  void wait() const;                                      // throws the error
  bool wait_for(std::chrono::nanoseconds timeout) const;  // false: not ended yet

  // Orders later work in the stream after this operation. The GPU waits for an event; for work of the host, the calling
  // thread waits.
  void order(const Stream& stream) const;

 private:
  friend class Promise;

  std::shared_future<void> result_;
  std::shared_ptr<Event> event_;
};

// Several operations in flight. The destructor waits for all of them: declare the memory that they use before this
// object, so that it outlives them. Used by one thread.
class InFlight {
 public:
  InFlight() = default;
  InFlight(InFlight&&) = delete;
  ~InFlight();  // ignores failures

  void add(Completion completion) { completions_.push_back(std::move(completion)); }
  void wait();  // waits for all, then throws the error of the first that failed

 private:
  std::vector<Completion> completions_;
};

// Waits for all, and ignores failures. `completion_of` names what has the completion in each element.
template <class Elements, class Projection = std::identity>
void settle(const Elements& elements, Projection completion_of = {}) {
  InFlight all;
  for (const auto& element : elements) {
    all.add(std::invoke(completion_of, element));
  }
}

// The producer's end. A promise that is destroyed without a result fails, so that no thread waits for ever.
class Promise {
 public:
  Promise() = default;
  Promise(Promise&&) noexcept = default;
  Promise& operator=(Promise&&) = delete;
  ~Promise();

  Completion completion() const;

  // Call one of the two, once.
  void finish();
  void fail(const std::exception_ptr& error);

 private:
  std::promise<void> promise_;
  std::shared_future<void> result_ = promise_.get_future().share();
};

// A wait that warns if a drive hangs. Such a drive gives no error, so the waiting thread logs from time to time what it
// waits for, and for how long.
// Waits as completion.wait() does. Calls `what` only for a warning, and never warns without a log.
void wait_watched(const Completion& completion, Log* log, const std::function<std::string()>& what,
                  std::chrono::milliseconds interval = std::chrono::seconds(30));

}  // namespace ballast::offload
