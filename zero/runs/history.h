// Chooses the commit from which the ranks of a run resume. A pure function of what each rank's drives hold, so every rank
// chooses the same.
#pragma once

#include <ballast/comm.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "offload/record_store.h"

namespace ballast {

inline constexpr offload::CommitPoint last_of_all{.incarnation = UINT64_MAX, .number = UINT64_MAX};

// The state of a run on one rank's drives.
struct RankHistory {
  bool has_files = false;
  std::uint64_t run_id = 0;
  std::vector<offload::FoundRecords::Found> commits{};  // of the run: two at most, the newest first

  bool lacks_records = false;  // true if a commit was dropped because records were missing or damaged

  void drop(offload::CommitPoint point);  // because its records are missing or damaged
};

RankHistory history_of(const std::optional<offload::FoundRecords>& found);

// Returns the history of every rank, by rank, without labels. All ranks call it together.
std::vector<RankHistory> histories_of_all(Communicator& world, const RankHistory& mine);

// The id of the run that all files belong to; none if no rank has files. B1009 if they belong to several runs.
std::optional<std::uint64_t> run_id_of(std::span<const RankHistory> ranks, const std::string& run);

// Returns a number greater than that of every commit on any rank, so that commits of this start are not taken for those
// of another one.
std::uint64_t next_incarnation(std::span<const RankHistory> ranks);

// The newest commit that every rank has: ranks do not commit at the same moment, and may be stopped in between. None if the run
// has not begun: files may exist without content, but no rank has made a step. B1009 if ranks have made steps, but have no
// commit in common; B3202 if they had one before records were lost.
// Commits after `last` do not count.
std::optional<offload::CommitPoint> common_point(std::span<const RankHistory> ranks, const std::string& run,
                                                 offload::CommitPoint last = last_of_all);

// Whether common_point() would throw: ranks have made steps, and have no commit in common.
bool are_apart(std::span<const RankHistory> ranks, offload::CommitPoint last = last_of_all);

}  // namespace ballast
