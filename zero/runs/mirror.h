// The records of another rank that this one keeps on its drives, so that a run survives the loss of a host or a drive.
#pragma once

#include <ballast/comm.h>

#include <vector>

#include "offload/run_directory.h"
#include "zero/engine/record_mirror.h"
#include "zero/runs/own_run.h"

namespace ballast {

class RunMirror {
 public:
  // Opens what is kept of the rank, or creates it. `own`: the name of this rank's records. All ranks construct theirs together,
  // when they have settled on their own records. Throws the same on all ranks: B1005 where no rank can mirror another one, B2204
  // if two ranks that mirror each other share a directory, B2202 without space.
  RunMirror(const OwnRun& run, const RecordFiles& own, Communicator& world);

  MirrorFiles& files() { return *files_; }
  const std::vector<std::size_t>& ranks_on_host() const {
    return on_host_;
  }  // whose mirrors lie on drives of this host

  // Brings mirrors to the commit with which the run continues, if it has begun. All ranks call it together; `next`: as
  // count_from().
  void catch_up(const offload::RecordStore& own, const std::optional<offload::CommitPoint>& point,
                offload::CommitPoint next, Communicator& world);

 private:
  void lock(const OwnRun& run, const RecordFiles& kept);

  std::vector<offload::RunDirectory> directories_{};
  std::vector<std::size_t> on_host_{};
  std::optional<MirrorFiles> files_{};
};

}  // namespace ballast
