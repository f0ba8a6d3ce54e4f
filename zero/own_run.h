// The run of a training as this rank keeps it on its drives.
#pragma once

#include <ballast/plan.h>

#include <string>
#include <vector>

#include "offload/record_store.h"
#include "zero/plan/compiled_plan.h"
#include "zero/run_files.h"

namespace ballast {

struct OwnRun {
  const CompiledPlan& plan;
  const RecordOptions& options;
  std::vector<offload::IoQueue*> queues{};  // of the directories, in order
  std::vector<std::string> description{};
  offload::RecordShape shape{};   // of this rank's records
  offload::StoreOptions files{};  // with the name of those that it keeps

  const std::string& name() const { return options.run; }
  std::size_t rank() const { return shape.rank; }

  // The directories of any rank's records on this rank's drives, and how to open them.
  std::vector<offload::Drive> drives(const RecordFiles& records) const {
    std::vector<offload::Drive> drives;
    for (std::size_t i = 0; i < queues.size(); ++i)
      drives.push_back({records.directory(options.directories[i], name()), queues[i]});
    return drives;
  }
  offload::StoreOptions files_of(const RecordFiles& records) const {
    offload::StoreOptions found = files;
    found.name = records.name();
    return found;
  }
  std::filesystem::path description_file(const RecordFiles& records) const {
    return records.directory(options.directories.front(), name()) / records.description_name();
  }
};

}  // namespace ballast
