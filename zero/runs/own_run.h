// The run of a training as this rank keeps it on its drives.
#pragma once

#include <ballast/error.h>
#include <ballast/records.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "offload/damage_mark.h"
#include "offload/record_store.h"
#include "zero/plan/compiled_plan.h"
#include "zero/runs/files.h"
#include "zero/runs/history.h"

namespace ballast {

// The directories of any rank's records on this rank's drives, and the queues of the drives, in order.
inline std::vector<offload::Drive> drives_of(const RecordFiles& records, const RecordOptions& options,
                                             std::span<offload::IoQueue* const> queues) {
  std::vector<offload::Drive> drives;
  for (std::size_t i = 0; i < queues.size(); ++i)
    drives.push_back({records.directory(options.directories[i], options.run), queues[i]});
  return drives;
}

inline offload::StoreOptions store_options(const RecordFiles& records, const RecordOptions& options) {
  return {.name = records.name(), .file = {.allow_network = options.allow_network}, .log = options.log};
}

// Records that end on one drive and not yet on another, as after a crash, are not whole.
inline std::optional<std::filesystem::path> missing_file(const std::vector<offload::Drive>& drives,
                                                         const offload::StoreOptions& files) {
  const auto lacks = std::ranges::find_if(
      drives, [&](const auto& drive) { return !std::filesystem::exists(files.path_in(drive.directory)); });
  return lacks == drives.end() ? std::nullopt : std::optional(files.path_in(lacks->directory));
}

// Whether an earlier read of the files has failed.
inline bool are_marked_damaged(const std::vector<offload::Drive>& drives, const offload::StoreOptions& files) {
  return std::ranges::any_of(
      drives, [&](const auto& drive) { return offload::is_marked_damaged(files.path_in(drive.directory)); });
}

// Whether records count as damaged where they are, so that another copy is looked for: they have other bytes than were
// written, or the drive cannot read them.
inline bool is_damage(const Error& error) {
  return error.code() == Code::bad_record || error.code() == Code::file_call;
}

struct OwnRun {
  const CompiledPlan& plan;
  const RecordOptions& options;
  std::vector<offload::IoQueue*> queues{};  // of the directories, in order
  std::vector<std::string> description{};
  offload::RecordShape shape{};   // of this rank's records
  offload::StoreOptions files{};  // with the name of those that it keeps

  const std::string& name() const { return options.run; }
  std::size_t rank() const { return shape.rank; }
  // The commit after which none counts.
  offload::CommitPoint last() const {
    const auto& point = options.resume_at;
    return point ? offload::CommitPoint{point->incarnation, point->number} : last_of_all;
  }

  // The directories of any rank's records on this rank's drives, and how to open them.
  std::vector<offload::Drive> drives(const RecordFiles& records) const { return drives_of(records, options, queues); }
  offload::StoreOptions files_of(const RecordFiles& records) const { return store_options(records, options); }
  std::filesystem::path description_file(const RecordFiles& records) const {
    return records.directory(options.directories.front(), name()) / records.description_name();
  }
};

}  // namespace ballast
