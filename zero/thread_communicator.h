// Ranks that are threads of one process: for tests, and for several ranks on one GPU.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/backend.h"
#include "zero/communicator.h"

namespace ballast {

// Where the threads of a group meet and show each other their memory.
class ThreadGroup {
 public:
  explicit ThreadGroup(std::size_t size) : shown_(size) {}
  std::size_t size() const { return shown_.size(); }

  // Waits for all ranks. Throws B3301 once the group was aborted.
  void meet();
  void abort();

  // Shows this rank's memory and waits, as meet() does, until all ranks have shown theirs. Each show() is followed by a
  // hide(), which waits until all ranks have looked. It does so in an aborted group too, where the others are still
  // looking, so that memory never goes while it is looked at.
  void show(std::size_t rank, ConstView memory);
  ConstView shown_by(std::size_t rank) const { return shown_[rank]; }
  void hide() noexcept;

 private:
  std::size_t arrive();  // at which meeting; called with the lock held

  std::vector<ConstView> shown_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t waiting_ = 0;
  std::size_t meeting_ = 0;
  bool aborted_ = false;
};

// `group` and `backend` outlive it. The backend does the sums; a thread's calls to it must not be needed by another's.
std::unique_ptr<Communicator> thread_communicator(ThreadGroup& group, std::size_t rank, kernels::Backend& backend);

}  // namespace ballast
