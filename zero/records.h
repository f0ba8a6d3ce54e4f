// Creates a rank's records on its drives, or opens those of a run, at a commit that all ranks have.
#pragma once

#include <ballast/comm.h>
#include <ballast/plan.h>

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "offload/record_store.h"
#include "offload/run_directory.h"
#include "zero/plan/compiled_plan.h"
#include "zero/run_history.h"

namespace ballast {

inline constexpr std::string_view description_name = "state.description";  // of the file that describes a run

// Throws B1001 for a name that cannot be part of the name of a directory.
void require_run_name(const std::string& run);

// The largest tile of a run that the drives hold, the same on all ranks; 0 where there is none. All ranks call together.
std::size_t tile_of_run(Communicator& world, const RecordOptions& options);

// Used by one thread at a time. All ranks construct theirs together; where that fails on one, all throw its error, and an
// existing run is not changed.
class Records {
 public:
  // Resumes from the newest commit that all ranks have, if the run has begun; else creates files. Refuses a run that a different
  // training began (other parameters, ranks, stage, format or rule): B1009, with the first difference.
  Records(const CompiledPlan& plan, Communicator& world, const RecordOptions& options);

  offload::RecordStore& store() { return *store_; }
  std::vector<offload::IoQueue*> queues() const;
  bool found() const { return found_; }

 private:
  // This training's run, for comparison with the one on the drives.
  struct Run {
    const std::string& name;
    std::vector<std::string> description;
    offload::RecordShape shape;
    offload::StoreOptions files;
  };

  void add_drive(const std::filesystem::path& directory, const RecordOptions& options);
  void open_run(Run run, Communicator& world, const RecordOptions& options);
  RankHistory look(const Run& run) const;
  void open_or_create(const Run& run, bool has_files);
  std::optional<offload::CommitPoint> go_to_common_point(const Run& run, RankHistory mine, Communicator& world);
  std::filesystem::path description_file() const { return drives_.front().directory / description_name; }

  std::vector<offload::RunDirectory> kept_;
  std::vector<std::unique_ptr<offload::IoQueue>> queues_;
  std::vector<offload::Drive> drives_;
  std::optional<offload::RecordStore> store_;
  bool found_ = false;
};

}  // namespace ballast
