// Creates a rank's records on its drives, or opens those of a run, at a commit that all ranks have.
#pragma once

#include <ballast/comm.h>
#include <ballast/records.h>

#include <filesystem>
#include <optional>
#include <string>

#include "offload/record_store.h"
#include "offload/run_directory.h"
#include "zero/engine/record_lane.h"
#include "zero/runs/files.h"
#include "zero/runs/inventory.h"
#include "zero/runs/mirror.h"

namespace ballast {

// Throws B1001 for a name that cannot be part of the name of a directory.
void require_run_name(const std::string& run);

// Throws B1001 unless all state of the run is on drives: it could not be resumed.
void require_run_on_drives(const std::string& run, const Spread& state);

// Throws B1001 if there are none.
void require_directories(const RecordOptions& options);

// The largest tile of a run that the drives hold, the same on all ranks; 0 where there is none. All ranks call together.
std::size_t tile_of_run(Communicator& world, const RecordOptions& options);

// Used by one thread at a time. All ranks construct theirs together; where that fails on one, all throw its error, and an
// existing run is not changed.
class Records {
 public:
  // Resumes from the newest commit that all ranks have, if the run has begun; else creates files. Takes over the records of other
  // ranks, or of another stage, format or tile: see takeover.h. Refuses a run of other parameters or another rule (B1009).
  // Frozen parameters are in scratch files, also of a run.
  Records(const CompiledPlan& plan, Communicator& world, const RecordOptions& options);

  RecordStores stores() { return {store_ ? &*store_ : nullptr, frozen_ ? &*frozen_ : nullptr}; }
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
  RankHistory look(const OwnRun& run) const;
  void open_or_create(const OwnRun& run, const RecordFiles& files, bool has_files);
  std::optional<offload::CommitPoint> go_to_common_point(const OwnRun& run, RankHistory mine, offload::CommitPoint last,
                                                         Communicator& world);

  std::vector<offload::RunDirectory> kept_;
  std::vector<std::unique_ptr<offload::IoQueue>> queues_;
  std::vector<offload::Drive> drives_;
  std::optional<offload::RecordStore> store_;
  std::optional<offload::RecordStore> frozen_;  // frozen parameters, which each start writes anew
  std::optional<RunMirror> mirror_;
  bool found_ = false;
  std::optional<LostRun> lost_{};
};

}  // namespace ballast
