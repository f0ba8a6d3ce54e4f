// A rank's records on its drives, and those of another rank that it mirrors there.
#pragma once

#include <ballast/comm.h>
#include <ballast/records.h>

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "offload/record_store.h"
#include "offload/run_directory.h"
#include "zero/engine/record_lane.h"
#include "zero/runs/adopt_run.h"
#include "zero/runs/files.h"
#include "zero/runs/inventory.h"

namespace ballast {

// The ranks that mirror each other: of two hosts, or of three where hosts are odd in number. Each keeps the records of the one on
// the host before its own, and that of the first host those of the last one.
struct MirrorGroup {
  std::size_t number = 0;
  std::vector<std::size_t> ranks{};    // ranks in order
  std::size_t mirrored = 0;            // the rank whose records this one keeps
  std::vector<std::size_t> on_host{};  // all ranks whose records this one's host keeps, or on one host may keep
};

// Chooses on whose drives the records of each rank are mirrored. A pure function of the ranks' hosts, so every rank chooses the
// same. `hosts` names the host of each rank. On one host, each rank counts as a host of its own: a lost drive is survived, not
// the host. Throws B1005 for a single rank, and for hosts with different numbers of ranks.
MirrorGroup mirror_group_of(std::size_t rank, std::span<const std::string> hosts);

// The records of another rank that this one keeps on its drives, so that a run survives the loss of a host or a drive.
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

// Throws B1001 for a name that cannot be part of the name of a directory.
void require_run_name(const std::string& run);

// Throws B1001 unless all state of the run is on drives: it could not be resumed.
void require_run_on_drives(const std::string& run, const Spread& state);

// Throws B1001 if there are none.
void require_directories(const RecordOptions& options);

// The largest tile of a run that the drives hold, the same on all ranks; 0 where there is none. All ranks call together.
std::size_t tile_of_run(Communicator& world, const RecordOptions& options);

// Creates a rank's records, or opens those of a run, at a commit that all ranks have. Used by one thread at a time. All ranks
// construct theirs together; where that fails on one, all throw its error, and an existing run is not changed.
class Records {
 public:
  // Resumes from the newest commit that all ranks have, if the run has begun; else creates files. Takes over the records of other
  // ranks, or of another stage, format or tile: see adopt_run.h. Refuses a run of other parameters or another rule (B1009).
  // Frozen parameters are in scratch files, also of a run.
  Records(const CompiledPlan& plan, Communicator& world, const RecordOptions& options);

  RecordStores stores() { return {store_ ? &*store_ : nullptr, frozen_ ? &*frozen_ : nullptr, peers_.get()}; }
  MirrorFiles* mirror() { return mirror_ ? &mirror_->files() : nullptr; }
  std::vector<offload::IoQueue*> queues() const;
  bool found() const { return found_; }
  const std::optional<LostRun>& lost() const { return lost_; }

 private:
  void add_drive(const std::filesystem::path& directory, const RecordOptions& options);
  void add_scratch_drives(Communicator& world, const RecordOptions& options);
  void add_drives_of_run(Communicator& world, const RecordOptions& options);
  void make_scratch(offload::RecordShape shape, Communicator& world, const offload::StoreOptions& files,
                    std::optional<offload::RecordStore>& into);
  void open_run(OwnRun run, Communicator& world);
  void open_or_create(const OwnRun& run, const SettledRun& settled);

  std::vector<offload::RunDirectory> kept_;
  std::vector<std::unique_ptr<offload::IoQueue>> queues_;
  std::vector<offload::Drive> drives_;
  std::optional<offload::RecordStore> store_;
  std::optional<offload::RecordStore> frozen_;  // frozen parameters, which each start writes anew
  std::optional<RunMirror> mirror_;
  std::unique_ptr<DrivePeers> peers_;
  bool found_ = false;
  std::optional<LostRun> lost_{};
};

}  // namespace ballast
