// What a rank sees of a run on its drives, and what all ranks see together.
#pragma once

#include <ballast/comm.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "zero/own_run.h"
#include "zero/run_inventory.h"

namespace ballast {

class RunSearch {
 public:
  // All of it outlives this.
  RunSearch(const OwnRun& own, Communicator& world) : own_(own), world_(world) {}

  // What one of this rank's files holds; nothing if it is a mirror that cannot be read, as if it were missing. Throws B1009 if they
  // are of a run that was kept with others, and this one is not.
  std::optional<offload::FoundRecords> found_in(const RecordFiles& files) const;
  // No lines if they are missing, damaged or of other records.
  std::vector<std::string> description_of(const RecordFiles& files, std::uint64_t digest) const;

  // All ranks call these together, each with the files that it sees. The first one throws B1009 if they belong to several runs.
  std::vector<SeenRecords> find_all(std::span<const RecordFiles> files) const;
  KnownCheckpoint newest_checkpoint(std::span<const RecordFiles> files) const;

 private:
  std::optional<offload::FoundRecords> read_head(const RecordFiles& files) const;
  void require_joint(const offload::FoundRecords& found) const;
  SeenRecords seen_in(const RecordFiles& files) const;
  std::filesystem::path directory_of(const RecordFiles& files) const {
    return files.directory(own_.options.directories.front(), own_.name());
  }

  const OwnRun& own_;
  Communicator& world_;
};

// What each rank sees, on all ranks, which call it together.
std::vector<SeenRecords> seen_by_all(Communicator& world, std::span<const SeenRecords> mine);

}  // namespace ballast
