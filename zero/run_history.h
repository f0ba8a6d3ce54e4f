// Which commit of a run its ranks resume from. A pure function of what each rank's drives hold, the same on every rank.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "offload/record_store.h"

namespace ballast {

// What a rank's drives hold of a run.
struct RankHistory {
  bool has_files = false;
  std::uint64_t run_id = 0;
  std::vector<offload::FoundRecords::Found> commits{};  // of the run: two at most, the newest first

  bool lacks_records = false;  // of a commit that is not among them for it

  void drop(offload::CommitPoint point);  // whose records are not there
};

RankHistory history_of(const std::optional<offload::FoundRecords>& found);

// The id of the run, which all files have; none where no rank has files. B1009 where they are of several runs.
std::optional<std::uint64_t> run_id_of(std::span<const RankHistory> ranks, const std::string& run);

// Above that of every commit on any rank, so that what this start commits is never taken for what another one did.
std::uint64_t next_incarnation(std::span<const RankHistory> ranks);

// The newest commit that every rank has: ranks do not commit at the same moment, and may have been stopped in between. None
// where the run has not begun: a rank may be made without being filled, but no rank has made a step. B1009 where ranks have
// made steps, and none of them in common; B3202 if they had, before records were lost.
std::optional<offload::CommitPoint> common_point(std::span<const RankHistory> ranks, const std::string& run);

}  // namespace ballast
