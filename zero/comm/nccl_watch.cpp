#include "zero/comm/nccl_watch.h"

#include <ballast/error.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "kernels/runtime/system_limits.h"

namespace ballast {
namespace {

constexpr auto look_again = std::chrono::milliseconds(100);
constexpr auto time_to_arrive = std::chrono::seconds(3);  // for what a rank sent before it left

}  // namespace

NcclWatch::NcclWatch(const ProcessGroup& group, const GpuStream& stream, std::function<void()> check)
    : group_(group),
      check_(std::move(check)),
      stream_(Stream::wrap(stream.stream, stream.gpu)),
      end_(stream.gpu),
      thread_(start_thread("watching an NCCL communicator", [this] { run(); })) {}

NcclWatch::~NcclWatch() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

// Work is not marked one by one, because events cost time: the thread marks what there is, a few times a second.
void NcclWatch::watch(const std::function<void()>& issue) {
  set_issuing(Clock::now());
  const auto end = [this](const void*) { set_issuing(std::nullopt); };
  const std::unique_ptr<const void, decltype(end)> issuing(this, end);
  issue();
}

void NcclWatch::set_issuing(std::optional<Clock::time_point> since) {
  {
    const std::lock_guard lock(mutex_);
    issuing_since_ = since;
    has_more_work_ = true;
  }
  changed_.notify_one();
}

void NcclWatch::run() {
  try {
    device::choose_gpu(stream_.gpu());
    if (is_late()) group_.fail_late_of_others();
  } catch (const Error& failure) {  // the GPU failed, or a rank is late or has left
    group_.job().error().set(failure.what());
  }
}

// Returns true when work is late, and false at the end.
bool NcclWatch::is_late() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ending_ || has_more_work_ || watched_since_; });
      if (ending_) return false;
    }
    if (has_waited_too_long()) return true;
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, look_again, [&] { return ending_; });
  }
}

// Calls of CUDA may wait for calls of other threads, so the mutex is free meanwhile.
bool NcclWatch::has_waited_too_long() {
  const auto now = Clock::now();
  const bool is_waiting = watched_since_ && !end_.is_done();
  const std::optional<Clock::time_point> issuing = issuing_since();
  if (issuing || is_waiting) {
    const auto waited = now - std::min(issuing.value_or(now), is_waiting ? *watched_since_ : now);
    require_all_ranks(waited);
    check_();
    if (waited > group_.job().timeout()) return true;
  }
  if (is_waiting) return false;
  watched_since_.reset();
  if (!take_more_work()) return false;
  end_.record(stream_);
  watched_since_ = now;
  return false;
}

std::optional<NcclWatch::Clock::time_point> NcclWatch::issuing_since() {
  const std::lock_guard lock(mutex_);
  return issuing_since_;
}

// Returns whether there is work that is not watched. What is being issued counts again after this.
bool NcclWatch::take_more_work() {
  const std::lock_guard lock(mutex_);
  return std::exchange(has_more_work_, issuing_since_.has_value());
}

// A rank that leaves ends its own work first, so what still waits for it will wait for ever.
void NcclWatch::require_all_ranks(Clock::duration waited) const {
  if (waited < time_to_arrive) return;
  for (std::size_t rank = 0; rank < group_.size(); ++rank) {
    if (group_.has_left(rank)) group_.fail_after_leave(rank);
  }
}

}  // namespace ballast
