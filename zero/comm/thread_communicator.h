// Ranks that are threads of one process: for tests, and for several ranks in one process.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "zero/comm/communicator.h"
#include "zero/comm/patience.h"
#include "zero/comm/transport.h"

namespace ballast {

// What a group of threads and all its parts have in common. Ranks are those of the whole group. Any thread may call.
class ThreadJob {
 public:
  FirstError& error() { return error_; }
  void come(std::size_t rank);
  void leave(std::size_t rank, const Farewell& farewell);
  std::optional<std::string> last_words(std::size_t rank);  // if it has left

 private:
  FirstError error_;
  std::mutex mutex_;
  std::map<std::size_t, std::string> left_;
};

// Where the threads of a group meet and show each other what they give.
class ThreadGroup {
 public:
  explicit ThreadGroup(std::size_t size, std::chrono::milliseconds timeout = default_timeout);
  std::size_t size() const { return shown_.size(); }
  void abort(std::string_view reason) { job_->error().set(std::string(reason)); }
  const std::shared_ptr<ThreadJob>& job() const { return job_; }

  // Shows what this rank gives, and waits until all ranks have shown theirs. Each show() that returns is followed by a
  // hide(), which waits until all ranks have looked. It does so in an aborted group too, where the others are still
  // looking, so that memory never goes while it is looked at.
  void show(std::size_t rank, const Round& given);
  const Round& shown_by(std::size_t rank) const { return shown_[rank]; }
  void hide(std::size_t rank) noexcept;

  std::unique_ptr<ThreadGroup> part(std::span<const std::size_t> ranks) const;  // fails with this one, and this with it

 private:
  ThreadGroup(std::vector<std::size_t> members, std::chrono::milliseconds timeout, std::shared_ptr<ThreadJob> job);
  std::size_t arrive(std::size_t rank);  // at which meeting; called with the lock held
  std::string missing() const;
  void fail_without_who_has_left() const;  // if one that is missing has

  std::vector<std::size_t> members_;  // ranks of the whole group
  std::vector<Round> shown_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<ThreadJob> job_;
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
