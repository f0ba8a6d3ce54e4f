#include "zero/comm/nccl_watch.h"

#include <ballast/error.h>

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
      thread_(start_thread("watching an NCCL communicator", [this] { run(); })) {}

NcclWatch::~NcclWatch() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void NcclWatch::watch(const std::function<void()>& issue) {
  Event end = unused_event();
  {
    const std::lock_guard lock(mutex_);
    under_way_.push_back({std::nullopt, Clock::now()});
  }
  changed_.notify_one();
  issue();
  end.record(stream_);
  const std::lock_guard lock(mutex_);
  under_way_.back().end = std::move(end);
}

Event NcclWatch::unused_event() {
  const std::lock_guard lock(mutex_);
  drop_ended_work();
  if (unused_.empty()) return Event(stream_.gpu());
  Event event = std::move(unused_.back());
  unused_.pop_back();
  return event;
}

void NcclWatch::run() {
  try {
    device::choose_gpu(stream_.gpu());
    if (is_late()) error_.set(late(some_rank, timeout_));
  } catch (const Error& failure) {  // the GPU failed
    error_.set(failure.what());
  }
}

// Returns true when a piece of work is late, and false at the end.
bool NcclWatch::is_late() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ending_ || !under_way_.empty(); });
    if (ending_) return false;
    drop_ended_work();
    if (!under_way_.empty() && Clock::now() - under_way_.front().since > timeout_) return true;
    changed_.wait_for(lock, look_again, [&] { return ending_; });
  }
}

void NcclWatch::drop_ended_work() {
  while (!under_way_.empty() && under_way_.front().end && under_way_.front().end->is_done()) {
    unused_.push_back(std::move(*under_way_.front().end));
    under_way_.pop_front();
  }
}

}  // namespace ballast
