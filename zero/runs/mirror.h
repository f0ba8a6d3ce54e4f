// The records of another rank that this one keeps on its drives, so that a run survives the loss of a host or a drive.
#pragma once

#include <ballast/comm.h>

#include <span>
#include <string>
#include <vector>

#include "offload/run_directory.h"
#include "zero/engine/record_mirror.h"
#include "zero/runs/files.h"

namespace ballast {

// The ranks that mirror each other: of two hosts, or of three where hosts are odd in number. Each keeps the records of the one on
// the host before its own, and that of the first host those of the last one.
struct MirrorGroup {
  std::size_t number = 0;
  std::vector<std::size_t> ranks{};    // ranks in order
  std::size_t mirrored = 0;            // the rank whose records this one keeps
  std::vector<std::size_t> on_host{};  // all ranks whose records this one's host keeps, or on one host may keep
};

// Chooses on whose drives the records of each rank are mirrored. A pure function of the ranks' hosts, so every rank chooses the same.
// `hosts` names the host of each rank. On one host, each rank counts as a host of its own: a lost drive is survived, not the host.
// Throws B1005 for a single rank, and for hosts with different numbers of ranks.
MirrorGroup mirror_group_of(std::size_t rank, std::span<const std::string> hosts);

class RunMirror {
 public:
  // Opens what is kept of the rank, or creates it. `own`: the name of this rank's records. All ranks construct theirs together,
  // when they have settled on their own records. Throws the same on all ranks: B1005 where no rank can mirror another one, B2204
  // if two ranks that mirror each other share a directory, B2202 without space.
  RunMirror(const OwnRun& run, const RecordFiles& own, Communicator& world);

  MirrorFiles& files() { return *files_; }
  // Whose mirrors lie on drives of this host.
  const std::vector<std::size_t>& ranks_on_host() const { return on_host_; }

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
