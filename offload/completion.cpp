#include "offload/completion.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <condition_variable>
#include <mutex>
#include <thread>

namespace ballast::offload {

struct Completion::State {
  std::mutex mutex{};
  std::condition_variable ended{};
  bool done = false;
  std::exception_ptr error{};

  void rethrow() const {
    if (error) std::rethrow_exception(error);
  }
};

Completion::Completion(std::shared_ptr<Event> event) : event_(std::move(event)) {}

bool Completion::is_done() const {
  if (event_ != nullptr) return event_->is_done();
  if (state_ == nullptr) return true;
  const std::lock_guard lock(state_->mutex);
  return state_->done;
}

void Completion::wait() const {
  if (event_ != nullptr) return event_->synchronize();
  if (state_ == nullptr) return;
  std::unique_lock lock(state_->mutex);
  state_->ended.wait(lock, [&] { return state_->done; });
  state_->rethrow();
}

bool Completion::wait_for(std::chrono::nanoseconds timeout) const {
  if (event_ != nullptr) {  // CUDA has no wait with a timeout
    const auto until = std::chrono::steady_clock::now() + timeout;
    while (!event_->is_done() && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return event_->is_done();
  }
  if (state_ == nullptr) return true;
  std::unique_lock lock(state_->mutex);
  if (!state_->ended.wait_for(lock, timeout, [&] { return state_->done; })) return false;
  state_->rethrow();
  return true;
}

void Completion::order(const Stream& stream) const { event_ != nullptr ? stream.wait_for(*event_) : wait(); }

void InFlight::wait() {
  std::exception_ptr first;
  for (const Completion& completion : completions_) {
    try {
      completion.wait();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  completions_.clear();
  if (first) std::rethrow_exception(first);
}

InFlight::~InFlight() {
  try {
    wait();
  } catch (...) {
    // A caller that needs the error has called wait().
  }
}

Promise::Promise() : state_(std::make_shared<Completion::State>()) {}

Promise::~Promise() {
  if (state_ == nullptr) return;  // moved-from
  const std::lock_guard lock(state_->mutex);
  if (state_->done) return;
  state_->done = true;
  state_->error = std::make_exception_ptr(
      Error(Code::internal, {.what = "an operation ended without a result: its promise was dropped"}, Site::here()));
  state_->ended.notify_all();
}

Completion Promise::completion() const {
  Completion completion;
  completion.state_ = state_;
  return completion;
}

void Promise::end(std::exception_ptr error) {
  const std::lock_guard lock(state_->mutex);
  require(!state_->done, Code::internal, [] { return Problem{.what = "cannot end an operation twice"}; });
  state_->done = true;
  state_->error = std::move(error);
  state_->ended.notify_all();  // the lock is held here, because the last waiter frees the state
}

void wait_watched(const Completion& completion, Log* log, const std::function<std::string()>& what,
                  std::chrono::milliseconds interval) {
  if (log == nullptr) return completion.wait();
  for (auto waited = interval; !completion.wait_for(interval); waited += interval) {
    log->warning(fmt::format("{} has not ended for {:.3g} s: the drive or its file system hangs", what(),
                             static_cast<double>(waited.count()) / 1000));
  }
}

}  // namespace ballast::offload
