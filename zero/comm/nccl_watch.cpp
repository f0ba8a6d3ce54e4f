#include "zero/comm/nccl_watch.h"

#include <ballast/error.h>

#include <memory>

#include "kernels/runtime/system_limits.h"

namespace ballast {
namespace {

constexpr auto look_again = std::chrono::milliseconds(100);
constexpr std::string_view some_rank = "a rank of an NCCL group";

}  // namespace

NcclWatch::NcclWatch(FirstError& error, std::chrono::milliseconds timeout, const GpuStream& stream)
    : error_(error),
      timeout_(timeout),
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
    if (is_late()) error_.set(late(some_rank, timeout_));
  } catch (const Error& failure) {  // the GPU failed
    error_.set(failure.what());
  }
}

// Returns true when work is late, and false at the end.
bool NcclWatch::is_late() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ending_ || has_more_work_ || watched_since_; });
    if (ending_) return false;
    if (has_waited_too_long()) return true;
    changed_.wait_for(lock, look_again, [&] { return ending_; });
  }
}

bool NcclWatch::has_waited_too_long() {
  const auto now = Clock::now();
  if (issuing_since_ && now - *issuing_since_ > timeout_) return true;
  if (watched_since_ && !end_.is_done()) return now - *watched_since_ > timeout_;
  watched_since_.reset();
  if (!has_more_work_) return false;
  has_more_work_ = issuing_since_.has_value();
  end_.record(stream_);
  watched_since_ = now;
  return false;
}

}  // namespace ballast
