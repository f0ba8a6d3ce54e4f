#include "zero/comm/gloo_calls.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <memory>

#include "zero/comm/broken_pipes.h"
#include "zero/comm/gloo_context.h"

namespace ballast {
namespace {

using gloo::transport::UnboundBuffer;

// Bytes that a rank sent before it left may arrive after the hub's news that it left. Its connections may stay open for
// longer, if its process or a child of it is still running.
constexpr auto time_to_arrive = std::chrono::seconds(3);

}  // namespace

GlooCalls::GlooCalls(const ProcessGroup& group) : group_(group), error_(group_.job().error()) {
  error_.when_set(this, [this] { abort_wait(); });
}

GlooCalls::~GlooCalls() { error_.forget(this); }

void GlooCalls::guarded(std::size_t peer, const std::function<void()>& call) {
  const Deadline deadline(error_, group_.job().timeout());
  const NoSignalOfBrokenPipes no_signal;
  try {
    call();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& broken) {
    require_descriptors(broken.what());
    explain(peer, deadline, broken.what());
  }
}

// A connection breaks before its reason is known: the hub reports which rank died or left.
void GlooCalls::explain(std::size_t peer, const Deadline& deadline, const char* gloo_says) {
  if (deadline.is_over()) group_.fail_late(peer);
  group_.wait_for_reason(peer);
  const std::string what = fmt::format("lost the connection to {}", group_.member(peer));
  group_.fail_because_of(peer, what);
  fail(Code::peer_failed, {.what = what, .available = gloo_says});
}

void GlooCalls::wait(std::size_t peer, UnboundBuffer& buffer,
                     const std::function<bool(std::chrono::milliseconds limit)>& wait_for) {
  wait_on(&buffer);
  const auto no_more = [this](UnboundBuffer*) { wait_on(nullptr); };
  const std::unique_ptr<UnboundBuffer, decltype(no_more)> waiting(&buffer, no_more);
  const Control::Wait told_to_hub = group_.wait_for(peer);
  bool is_done = false;
  while (!is_done) {  // or there is news of another rank
    error_.check();
    const std::chrono::milliseconds limit = group_.has_left(peer) ? time_to_arrive : group_.job().timeout();
    guarded(peer, [&] { is_done = wait_for(limit); });
  }
}

// The buffer whose wait the news ends.
void GlooCalls::wait_on(UnboundBuffer* buffer) {
  const std::lock_guard lock(mutex_);
  waiting_ = buffer;
}

// Called by the thread that has news: the first error, or a rank that has left.
void GlooCalls::abort_wait() {
  const std::lock_guard lock(mutex_);
  if (waiting_ == nullptr) return;
  waiting_->abortWaitRecv();
  waiting_->abortWaitSend();
}

}  // namespace ballast
