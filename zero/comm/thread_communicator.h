// Ranks that are threads of one process.
#pragma once

#include <ballast/comm.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "zero/comm/deadline.h"
#include "zero/comm/transport.h"

namespace ballast {

class ThreadJob;  // the common state of a group of threads and all its subgroups

// The rendezvous of a group of threads: each publishes the chunk that it sends. Any thread may call.
class ThreadGroup {
 public:
  // Each `ranks_per_host` ranks count as one host in the order of sums.
  explicit ThreadGroup(std::size_t size, std::chrono::milliseconds timeout = default_timeout,
                       std::size_t ranks_per_host = 1);
  std::vector<std::string> hosts() const;  // the host of each rank
  std::size_t size() const { return published_.size(); }
  std::size_t rank_in_job(std::size_t rank) const { return members_[rank]; }  // its number in the whole group
  std::string name_of(std::size_t rank) const;                                // "rank 3", the same number
  void abort(std::string_view reason);
  const std::shared_ptr<ThreadJob>& job() const { return job_; }

  // Publishes this rank's chunk, and waits until all ranks have published theirs. Each publish() that returns is
  // followed by a withdraw(), which waits until all ranks have read. It waits in an aborted group too, so that memory
  // is never freed while a peer reads it.
  void publish(std::size_t rank, const Sent& chunk);
  const Sent& published_by(std::size_t rank) const { return published_[rank]; }
  void withdraw(std::size_t rank) noexcept;

  std::unique_ptr<ThreadGroup> part(std::span<const std::size_t> ranks) const;  // the two fail together

 private:
  std::size_t arrive(std::size_t rank);    // returns the generation; called with the lock held
  std::size_t missing() const;             // the first rank that has not arrived
  void fail_if_missing_rank_left() const;  // throws if a missing rank has left

  std::vector<std::size_t> members_;  // ranks of the whole group
  std::vector<Sent> published_;
  std::chrono::milliseconds timeout_;
  std::size_t ranks_per_host_;
  std::shared_ptr<ThreadJob> job_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> arrived_;
  std::size_t waiting_ = 0;
  std::size_t generation_ = 0;
};

// `group` and `backend` outlive the communicator and all that is split from it. A call of the backend returns when its
// work is done, and does not wait for the call of another rank.
std::unique_ptr<Communicator> thread_communicator(ThreadGroup& group, std::size_t rank, kernels::Backend& backend);

// A communicator of a single rank. The backend outlives it and all that is split from it, which keep `owned` alive.
std::unique_ptr<Communicator> lone_communicator(kernels::Backend& backend, std::shared_ptr<void> owned = {});

}  // namespace ballast
