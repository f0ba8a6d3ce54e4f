// Ranks that are threads of one process: for tests, and for several ranks in one process.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/backend.h"
#include "zero/comm/communicator.h"
#include "zero/comm/patience.h"
#include "zero/comm/transport.h"

namespace ballast {

// Where the threads of a group meet and show each other what they give.
class ThreadGroup {
 public:
  explicit ThreadGroup(std::size_t size, std::chrono::milliseconds timeout = default_timeout,
                       std::shared_ptr<FirstError> error = std::make_shared<FirstError>());
  std::size_t size() const { return shown_.size(); }
  void abort(std::string_view reason) { error_->set(std::string(reason)); }

  // Shows what this rank gives, and waits until all ranks have shown theirs. Each show() that returns is followed by a
  // hide(), which waits until all ranks have looked. It does so in an aborted group too, where the others are still
  // looking, so that memory never goes while it is looked at.
  void show(std::size_t rank, const Round& given);
  const Round& shown_by(std::size_t rank) const { return shown_[rank]; }
  void hide(std::size_t rank) noexcept;

  std::unique_ptr<ThreadGroup> part(std::size_t size) const;  // fails with this one, and this one with it

 private:
  std::size_t arrive(std::size_t rank);  // at which meeting; called with the lock held
  std::string missing() const;

  std::vector<Round> shown_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<FirstError> error_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> here_;
  std::size_t waiting_ = 0;
  std::size_t meeting_ = 0;
};

// `group` and `backend` outlive it and all that is split from it. The backend is done when a call of it returns; a thread's
// calls to it must not be needed by another's.
std::unique_ptr<Communicator> thread_communicator(ThreadGroup& group, std::size_t rank, kernels::Backend& backend);

// One rank, alone.
std::unique_ptr<Communicator> lone_communicator(kernels::Backend& backend);

}  // namespace ballast
