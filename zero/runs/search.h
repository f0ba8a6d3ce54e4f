// What a rank sees of a run on its drives, what all ranks see together, and whether it is intact.
#pragma once

#include <ballast/comm.h>

#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/runtime/host_pages.h"
#include "zero/runs/inventory.h"

namespace ballast {

class RunSearch {
 public:
  // All of it outlives this. `own`: the training that is going to resume the run; null: none yet.
  RunSearch(const RecordOptions& options, std::span<offload::IoQueue* const> queues, Communicator& world,
            const OwnRun* own = nullptr)
      : options_(options), queues_(queues), world_(world), own_(own) {}

  // What one of this rank's files holds; nothing if it cannot be read, or is a mirror of another run. Throws B1009 if they are of a
  // run that is resumed together with others, and the training resumes it alone.
  std::optional<offload::FoundRecords> found_in(const RecordFiles& files) const;
  // The same, but throws B3202 if it cannot be read.
  std::optional<offload::FoundRecords> read_head(const RecordFiles& files) const;
  // Whether this rank's files have a commit with the heads of all its records.
  bool has_commit(const RecordFiles& files, offload::CommitPoint point) const;
  // Throws B3201 if a drive of this rank's files cannot read them. That may pass, so they are not lost.
  void require_readable_drives(std::span<const RecordFiles> files) const;
  // Whether an earlier read of this rank's files has failed.
  bool is_marked_damaged(const RecordFiles& files) const {
    return are_marked_damaged(drives(files), store_options(files, options_));
  }
  // No lines if they are missing, damaged or of other records.
  std::vector<std::string> description_of(const RecordFiles& files, std::uint64_t digest) const;

  // All ranks call these together, each with the files that it sees. The first one throws B1009 if they belong to several runs, and
  // leaves out commits that lack records.
  std::vector<SeenRecords> find_all(std::span<const RecordFiles> files) const;
  KnownCheckpoint newest_checkpoint(std::span<const RecordFiles> files) const;
  // Drops the commit from `seen` for the files in `damaged`, which each rank passes for its own drives. Returns whether any rank
  // passed one.
  bool forget(std::vector<SeenRecords>& seen, offload::CommitPoint point, std::span<const RecordFiles> damaged) const;

 private:
  void require_joint(const offload::FoundRecords& found) const;
  bool holds(const RecordFiles& files, const offload::FoundRecords& found, offload::CommitPoint point) const;
  SeenRecords seen_in(const RecordFiles& files) const;
  std::vector<offload::Drive> drives(const RecordFiles& files) const { return drives_of(files, options_, queues_); }
  std::filesystem::path directory_of(const RecordFiles& files) const {
    return files.directory(options_.directories.front(), options_.run);
  }

  const RecordOptions& options_;
  std::span<offload::IoQueue* const> queues_;
  Communicator& world_;
  const OwnRun* own_;
};

// The records of a whole run at its commit, as this rank sees them. They are read, and never changed.
class EarlierRecords {
 public:
  // `shape`: with the id of the run. All of it outlives this.
  EarlierRecords(const OwnRun& own, const WholeRun& run, const offload::RecordShape& shape)
      : own_(own), run_(run), shape_(shape) {}

  // Whether a copy, which this rank sees, has the heads of all records; are_intact() reads all of their bytes, too.
  bool are_there(const WholeRun::Copy& copy) { return opened(copy) != nullptr; }
  bool are_intact(const WholeRun::Copy& copy);
  std::span<const std::byte> note_of(const WholeRun::Copy& copy) { return store_of(copy).note(); }
  // A record's payload, until the next call.
  std::span<std::byte> read(const WholeRun::Copy& copy, std::size_t record);

 private:
  using Name = std::pair<std::size_t, bool>;  // rank, and whether it is its mirror
  static Name name_of(const WholeRun::Copy& copy) { return {copy.rank, copy.is_mirror}; }

  offload::RecordStore* opened(const WholeRun::Copy& copy);
  offload::RecordStore& store_of(const WholeRun::Copy& copy);

  const OwnRun& own_;
  const WholeRun& run_;
  offload::RecordShape shape_;
  std::map<Name, std::optional<offload::RecordStore>> stores_{};  // none: records are damaged
  HostPages memory_{};
  std::pair<Name, std::size_t> in_memory_{{SIZE_MAX, false}, 0};  // the name, and the record
  std::span<std::byte> payload_{};
};

// Whether each rank sees its own records of the run at its commit. Records that are known to be damaged count only where
// there is no other copy.
bool is_in_place(const WholeRun& run, std::span<const SeenRecords> seen, const OwnRun& own, std::size_t ranks);

// Returns a run that is in place at an earlier commit, if an earlier read of records at its own commit has failed and fails
// again. None if nothing is damaged, or if not all ranks have an earlier commit that is intact. The log says which. All ranks
// call it together.
std::optional<WholeRun> run_before_damage(const WholeRun& run, std::span<const SeenRecords> seen, const OwnRun& own,
                                          const RunSearch& search, Communicator& world);

}  // namespace ballast
