// Some of the processes of a job, and what they tell each other before they have a transport.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "zero/comm/job.h"

namespace ballast {

class ProcessGroup {
 public:
  explicit ProcessGroup(std::shared_ptr<Job> job, std::size_t rank);  // all of them

  std::size_t rank() const { return rank_; }
  std::size_t size() const { return members_.size(); }
  const std::string& name() const { return name_; }  // of no other group of the job
  std::string member(std::size_t rank) const { return text(members_[rank]); }
  Job& job() const { return *job_; }

  // What Control does, of ranks of this group.
  [[noreturn]] void give_up_on(std::size_t rank) const { job_->control().give_up_on(members_[rank].rank); }
  bool has_left(std::size_t rank) const { return job_->control().has_left(members_[rank].rank); }
  [[noreturn]] void fail_without(std::size_t rank) const { job_->control().fail_without(members_[rank].rank); }
  void learn_of(std::size_t rank) const { job_->control().learn_of(members_[rank].rank); }

  // Those that `ranks` of this one form. All of them call.
  ProcessGroup part(std::span<const std::size_t> ranks);

  // What each rank says of a subject, by rank. All of them call.
  std::vector<std::string> ask_all(const std::string& subject, const std::string& mine);

 private:
  std::shared_ptr<Job> job_;
  std::string name_ = "all";
  std::vector<Member> members_;
  std::size_t rank_;
  std::size_t parts_ = 0;
};

}  // namespace ballast
