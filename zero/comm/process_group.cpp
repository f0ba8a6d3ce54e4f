#include "zero/comm/process_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace ballast {

ProcessGroup::ProcessGroup(std::shared_ptr<Job> job, std::size_t rank)
    : job_(std::move(job)), members_(job_->control().members()), rank_(rank) {}

ProcessGroup ProcessGroup::part(std::span<const std::size_t> ranks) {
  ProcessGroup group = *this;
  group.name_ = fmt::format("{}.{}.{}", name_, parts_++, ranks.front());
  group.members_.clear();
  for (const std::size_t rank : ranks) {
    group.members_.push_back(members_[rank]);
  }
  group.rank_ = static_cast<std::size_t>(std::ranges::find(ranks, rank_) - ranks.begin());
  group.parts_ = 0;
  return group;
}

bool ProcessGroup::is_on_one_machine() const {
  return std::ranges::all_of(members_, [&](const Member& each) { return each.machine == members_[rank_].machine; });
}

void ProcessGroup::fail_late_of_others() const {
  std::vector<std::size_t> others;
  for (std::size_t rank = 0; rank < size(); ++rank) {
    if (rank != rank_) others.push_back(members_[rank].rank);
  }
  job_->control().fail_late(others);
}

std::vector<std::string> ProcessGroup::hosts() const {
  std::vector<std::string> names;
  std::ranges::transform(members_, std::back_inserter(names), [&](const Member& each) { return job_->host(each); });
  return names;
}

std::vector<std::string> ProcessGroup::exchange_strings(const std::string& subject, const std::string& mine) {
  std::vector<std::size_t> ranks;
  std::ranges::transform(members_, std::back_inserter(ranks), &Member::rank);
  return job_->control().share(fmt::format("{}/{}", name_, subject), {rank_, size(), mine}, ranks);
}

}  // namespace ballast
