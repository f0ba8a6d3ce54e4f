// What a rank sees of a run on its drives, and what all ranks see together.
#pragma once

#include <ballast/comm.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "zero/runs/inventory.h"
#include "zero/runs/own_run.h"

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

}  // namespace ballast
