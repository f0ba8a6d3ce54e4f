#include "offload/completion.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <thread>

namespace ballast::offload {

namespace {

bool has_ended(const std::shared_future<void>& result, std::chrono::nanoseconds timeout = {}) {
  return result.wait_for(timeout) == std::future_status::ready;
}

void require_first_end(const std::shared_future<void>& result) {
  require(!has_ended(result), Code::internal, [] { return Problem{.what = "cannot end an operation twice"}; });
}

}  // namespace

Completion::Completion(std::shared_ptr<Event> event) : event_(std::move(event)) {}

bool Completion::is_done() const {
  return event_ != nullptr ? event_->is_done() : !result_.valid() || has_ended(result_);
}

void Completion::wait() const {
  if (event_ != nullptr) return event_->synchronize();
  if (result_.valid()) result_.get();
}

bool Completion::wait_for(std::chrono::nanoseconds timeout) const {
  if (event_ != nullptr) {  // CUDA has no wait with a timeout
    const auto until = std::chrono::steady_clock::now() + timeout;
    while (!event_->is_done() && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return event_->is_done();
  }
  if (result_.valid() && !has_ended(result_, timeout)) return false;
  wait();
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

Promise::~Promise() {
  if (!result_.valid() || has_ended(result_)) return;  // moved-from, or ended
  promise_.set_exception(std::make_exception_ptr(
      Error(Code::internal, {.what = "an operation ended without a result: its promise was dropped"}, Site::here())));
}

Completion Promise::completion() const {
  Completion completion;
  completion.result_ = result_;
  return completion;
}

void Promise::finish() {
  require_first_end(result_);
  promise_.set_value();
}

void Promise::fail(const std::exception_ptr& error) {
  require_first_end(result_);
  promise_.set_exception(error);
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
