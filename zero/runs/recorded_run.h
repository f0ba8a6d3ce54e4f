// The records of a run or of a checkpoint, which are read without a training.
#pragma once

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "zero/comm/thread_communicator.h"
#include "zero/runs/search.h"

namespace ballast {

// The newest commit that all ranks have. A training may overwrite the records meanwhile: then reads throw B3202.
class RecordedRun {
 public:
  // Opens the run `name` in a directory that has the records of all ranks, and writes nothing. Throws B1001 if it has not begun,
  // B1009 if the records of a rank are missing, and B3202 if they are damaged.
  RecordedRun(const std::filesystem::path& directory, const std::string& name);
  RecordedRun(RecordedRun&&) = delete;

  // The commit as a checkpoint, with the trained tensors alone. Its pieces are records. The optimizer is the rule as
  // optim::name() has it, with the number of its own values.
  SavedCheckpoint checkpoint();
  std::vector<std::string> trained() const { return state_.trained(); }  // the names in the order of units
  // The note of a rank: with trainings of Python they are the same on all.
  std::span<const std::byte> note() { return records_.note_of(run_.copies.front().front()); }

 private:
  WholeRun whole_run() const;
  RecordedState recorded_state() const;

  RecordOptions options_;
  const Goal goal_{
      options_.run, fmt::format("read run \"{}\"", options_.run),
      "Bring the records of all ranks to the directory. If a training continues the run, wait until it has "
      "ended."};
  std::unique_ptr<kernels::Backend> backend_ = kernels::cpu_backend({.threads = 1});
  std::unique_ptr<Communicator> alone_ = lone_communicator(*backend_);
  std::unique_ptr<offload::IoQueue> queue_ = offload::open_queue();
  RunDrives drives_{options_, {queue_.get()}};
  RunSearch search_{drives_, *alone_, goal_};
  std::vector<SeenRecords> seen_;
  WholeRun run_;
  RecordedState state_;
  EarlierRecords records_{drives_, run_, run_.shape_of(state_, known_run_id(seen_))};
};

inline RecordedRun::RecordedRun(const std::filesystem::path& directory, const std::string& name)
    : options_{.directories = {directory}, .run = name, .allow_network = true},
      seen_(search_.find_all(search_.files())),
      run_(whole_run()),
      state_(recorded_state()) {}

inline SavedCheckpoint RecordedRun::checkpoint() {
  const auto choose = [&](std::size_t shard, const std::string&, const Range&) { return &run_.nearest(shard, 0); };
  SavedCheckpoint found = state_.saved();
  found.optimizers.front().step = run_.step;
  found.tensors = records_.tensors(state_, choose);
  found.converted_from = "a run";
  found.files = records_.files();
  return found;
}

inline WholeRun RecordedRun::whole_run() const {
  auto found = newest_whole_run(seen_, goal_);
  require(found.has_value(), Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot read run \"{}\": it has no records of a step", options_.run),
                   .where = options_.directories.front().string(),
                   .needed = "a run that has begun, or a checkpoint"};
  });
  return std::move(*found);
}

inline RecordedState RecordedRun::recorded_state() const {
  auto found = RecordedState::of(search_.description_of(run_.files_of(run_.copies.front().front()), run_.digest));
  require(found.has_value(), Code::bad_record, [&] {
    return Problem{.what = fmt::format("cannot {}: its description is missing or damaged", goal_.what),
                   .where = options_.directories.front().string()};
  });
  return std::move(*found);
}

// The names of the runs that have records in a directory, in order.
inline std::vector<std::string> runs_in(const std::filesystem::path& directory) {
  std::set<std::string> names;
  std::error_code failed;
  for (std::filesystem::directory_iterator entry(directory, failed), end; !failed && entry != end;
       entry.increment(failed)) {
    const std::string name = entry->path().filename().string();
    const std::size_t rank = name.rfind("-rank-");
    if (rank == std::string::npos || rank == 0 || names.contains(name.substr(0, rank))) continue;
    std::error_code unreadable;  // another user's folder is none of ours
    const std::filesystem::directory_iterator files(entry->path(), unreadable);
    const bool has_records =
        !unreadable && std::any_of(begin(files), std::filesystem::directory_iterator(),
                                   [](const auto& file) { return file.path().extension() == ".records"; });
    if (has_records) names.insert(name.substr(0, rank));
  }
  return {names.begin(), names.end()};
}

}  // namespace ballast
