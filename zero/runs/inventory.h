// Finds the commit from which a run resumes. Pure functions of what each rank sees on its drives, so every rank finds the same.
#pragma once

#include <ballast/comm.h>
#include <ballast/placement.h>

#include <optional>
#include <span>
#include <vector>

#include "offload/record_store.h"
#include "zero/runs/files.h"
#include "zero/runs/recorded_state.h"

namespace ballast {

// One rank's records of a run, as a rank of this job sees them, wherever they are. The ranks of a site see the same records, and
// one of them has looked.
struct SeenRecords {
  std::size_t seen_by = 0;   // rank of this job
  std::size_t site = 0;      // its site: see Sites
  RecordFiles files{};       // files.rank: of the run
  std::uint64_t run_id = 0;  // 0: the files cannot be read
  std::uint64_t digest = 0;  // digest of the description
  // The run's ranks, as its description says: without tiers. `is_described` is false if that is missing or damaged.
  bool is_described = false;
  bool is_of_model = false;  // has the same parameters and rule as this training, as it says
  Placement placement{};
  std::vector<offload::FoundRecords::Found> commits{};  // two at most, the newest first
  bool lacks_records = false;                           // commits or records are missing or damaged
  bool has_newest = false;  // the newest commit that counts is whole, and no read has failed

  bool has(offload::CommitPoint point) const;
  void drop(offload::CommitPoint point);  // called because records of the commit are missing or damaged
};

// The records in files that were found, without what their description says.
SeenRecords seen_records(const RecordFiles& files, std::size_t seen_by, const offload::FoundRecords& found);

// Returns what all ranks see. All ranks call it together, each with what it sees itself.
std::vector<SeenRecords> seen_by_all(Communicator& world, std::span<const SeenRecords> mine);

// The newest commit that all of these records have, of those up to `last`.
std::optional<offload::CommitPoint> newest_common(std::span<const SeenRecords> ranks, offload::CommitPoint last);

// Whether any of these records has a step: files may exist without content.
bool have_begun(std::span<const SeenRecords> ranks, offload::CommitPoint last);

// The records of the ranks that trained together, at one commit.
struct WholeRun {
  struct Copy {
    std::size_t rank = 0;  // a rank of the run
    std::size_t seen_by = 0;
    std::size_t site = 0;
    bool is_mirror = false;
  };
  std::uint64_t made_in = 0;
  std::uint64_t digest = 0;
  Placement placement{};
  offload::CommitPoint point{};
  std::uint64_t step = 0;
  offload::CommitLabel label{};
  std::vector<std::vector<Copy>> copies{};  // each shard's copies, all of them at this commit; in order

  // The records of a shard that ranks of a site read: those that they see if there are any, else those of the first other site.
  const Copy& nearest(std::size_t shard, std::size_t site) const;
  const Copy* copy_of(std::size_t rank) const;  // one of the records of this rank of the run; null: there are none
  RecordFiles files_of(const Copy& copy) const { return {copy.rank, made_in, copy.is_mirror}; }
  offload::RecordShape shape_of(const RecordedState& state, std::uint64_t run_id) const;  // leaves the rank out
};

// The newest one, of the commits up to `last`; none if there is none.
std::optional<WholeRun> find_whole_run(std::span<const SeenRecords> seen, offload::CommitPoint last = last_of_all);

// The newest one, of the commits up to `last`. None if no rank has made a step by then. Else throws B1009 if a shard has no
// records, or if the shards have no commit in common; B3202 if they may have had one before records were damaged. The error
// names the run's newest checkpoint.
std::optional<WholeRun> newest_whole_run(std::span<const SeenRecords> seen, const Goal& goal,
                                         const KnownCheckpoint& checkpoint = {},
                                         offload::CommitPoint last = last_of_all);

// Forgets a commit of one rank's records.
void drop(std::vector<SeenRecords>& seen, const RecordFiles& files, std::size_t seen_by, offload::CommitPoint point);

// The id of the run; 0 if no files can be read.
std::uint64_t known_run_id(std::span<const SeenRecords> seen);

// Greater than that of every commit that is seen, and of all files: commits of this start are not taken for those of another one.
std::uint64_t next_incarnation(std::span<const SeenRecords> seen);

// Throws B1009 if the records belong to several runs.
void require_one_run(std::span<const SeenRecords> seen, const Goal& goal);

}  // namespace ballast
