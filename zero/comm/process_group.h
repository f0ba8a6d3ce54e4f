// A group of processes of a job: the strings that they exchange before they have a transport, and TCP connections between them.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/runtime/descriptor.h"
#include "zero/comm/job.h"

namespace ballast {

// Used by one thread at a time.
class ProcessGroup {
 public:
  explicit ProcessGroup(std::shared_ptr<Job> job, std::size_t rank);  // the group of all processes

  std::size_t rank() const { return rank_; }
  std::size_t size() const { return members_.size(); }
  const std::string& name() const { return name_; }  // unique in the job
  std::string member(std::size_t rank) const { return text(members_[rank]); }
  std::size_t rank_in_job(std::size_t rank) const { return members_[rank].rank; }
  bool is_on_one_machine() const;  // whether all ranks can share memory
  Job& job() const { return *job_; }
  std::vector<std::string> hosts() const;  // the host of each rank

  // The calls of Job, with ranks of this group.
  [[noreturn]] void fail_late(std::size_t rank) const { job_->fail_late({members_[rank].rank}); }
  [[noreturn]] void fail_late_of_others() const;  // when it is not known which of the other ranks is late
  Job::Wait wait_for(std::size_t rank) const { return {*job_, {members_[rank].rank}}; }
  bool has_left(std::size_t rank) const { return job_->has_left(members_[rank].rank); }
  [[noreturn]] void fail_after_leave(std::size_t rank) const { job_->fail_after_leave(members_[rank].rank); }
  void fail_because_of(std::size_t rank, const std::string& what) const { job_->fail(what, {members_[rank].rank}); }
  void wait_for_reason(std::size_t rank) const { job_->wait_for_reason(members_[rank].rank); }

  // Return the group of `ranks` of this one. All of them call.
  ProcessGroup part(std::span<const std::size_t> ranks);

  // Return the string of each rank about a subject, by rank. All ranks of the group call.
  std::vector<std::string> exchange_strings(const std::string& subject, const std::string& mine);

 private:
  std::shared_ptr<Job> job_;
  std::string name_ = "all";
  std::vector<Member> members_;
  std::size_t rank_;
  std::size_t parts_ = 0;
};

// Returns a connection with each other rank, by rank; none with this one. Only processes that know the job's secret get one. All ranks of the group call. Throws B3301 or B3302 if a
// rank fails or does not come.
std::vector<Descriptor> connect_links(ProcessGroup& group);

}  // namespace ballast
