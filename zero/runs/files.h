// The files of a run on a drive: their names, the run's description, and which there are; and the run of a training as this rank
// keeps it in such files.
#pragma once

#include <ballast/error.h>
#include <ballast/records.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "offload/record_store.h"
#include "zero/plan/compile.h"

namespace ballast {

inline constexpr offload::CommitPoint last_of_all{.incarnation = UINT64_MAX, .number = UINT64_MAX};

// One rank's records of a run, which have one name in the directories of all drives of the rank.
struct RecordFiles {
  std::size_t rank = 0;
  std::uint64_t made_in = 0;  // the incarnation that took the run over from others to make them; 0: those it began with
  bool is_mirror = false;     // kept by a peer of the rank, on its own drives

  std::filesystem::path directory(const std::filesystem::path& drive, const std::string& run) const;
  std::string name() const;              // "state", or "state-7"; of a mirror "mirror", or "mirror-7"
  std::string description_name() const;  // the file's name in the first directory

  auto operator<=>(const RecordFiles&) const = default;  // NOLINT(modernize-use-nullptr): a false alarm
};

// The files that have records on this drive, in order, of the ranks of the run for which `is_wanted` returns true.
using IsWanted = std::function<bool(std::size_t rank)>;
std::vector<RecordFiles> record_files_on(const std::filesystem::path& drive, const std::string& run,
                                         const IsWanted& is_wanted);

// A file that a killed process has left: it is not finished, or a description without records.
struct Leftover {
  RecordFiles files{};  // the files to which it would belong
  std::filesystem::path path{};
};
std::vector<Leftover> leftovers_on(const std::filesystem::path& drive, const std::string& run,
                                   const IsWanted& is_wanted);

// Removes the files from this drive, where other ranks may remove them at the same time. They are gone for good when this
// returns. Throws B3201 if records stay.
void remove_records(const std::filesystem::path& drive, const std::string& run, const RecordFiles& files);

// Removes the rank's directory from this drive, if it has no other records.
void remove_empty_directory(const std::filesystem::path& drive, const std::string& run, const RecordFiles& files);

// A checkpoint that a training of the run has saved or loaded.
struct KnownCheckpoint {
  std::uint64_t step = 0;
  std::string path{};  // empty: none is known
};

// The newest one of which a text file in the rank's directory tells: `newest-checkpoint`, with the step, a space and the path.
KnownCheckpoint newest_checkpoint_of(const std::filesystem::path& directory);
void write_newest_checkpoint(const std::filesystem::path& directory, const KnownCheckpoint& newest);

// Whether records count as damaged where they are, so that another copy is looked for: they have other bytes than were
// written, or the drive cannot read them.
inline bool is_damage(const Error& error) {
  return error.code() == Code::bad_record || error.code() == Code::file_call;
}

// The drives of this rank on which records of a run lie, of any rank.
struct RunDrives {
  const RecordOptions& options;
  std::vector<offload::IoQueue*> queues{};  // queues of the directories, in order

  const std::string& name() const { return options.run; }

  std::vector<offload::Drive> drives(const RecordFiles& records) const {
    std::vector<offload::Drive> drives;
    for (std::size_t i = 0; i < queues.size(); ++i)
      drives.push_back({records.directory(options.directories[i], name()), queues[i]});
    return drives;
  }
  offload::StoreOptions files_of(const RecordFiles& records, bool writable = true) const {
    return {.name = records.name(),
            .file = {.allow_network = options.allow_network, .writable = writable},
            .log = options.log};
  }
  std::filesystem::path first_directory(const RecordFiles& records) const {
    return records.directory(options.directories.front(), name());
  }
  std::filesystem::path description_file(const RecordFiles& records) const {
    return first_directory(records) / records.description_name();
  }

  // Records that end on one drive and not yet on another, as after a crash, are not whole.
  std::optional<std::filesystem::path> missing_file(const RecordFiles& records) const {
    for (const offload::Drive& drive : drives(records)) {
      const std::filesystem::path file = files_of(records).path_in(drive.directory);
      if (!std::filesystem::exists(file)) return file;
    }
    return {};
  }

  // Whether an earlier read of the files has failed.
  bool are_marked_damaged(const RecordFiles& records) const {
    return std::ranges::any_of(drives(records), [&](const offload::Drive& drive) {
      return offload::is_marked_damaged(files_of(records).path_in(drive.directory));
    });
  }

  void warn(const std::string& line) const {
    if (options.log != nullptr) options.log->warning(line);
  }

  // Returns what `read` does; nothing, with a warning, if it finds damage, or with `of_any_run` records of another run.
  template <class Read>
  auto unless_damaged(const Read& read, bool of_any_run = false) const -> decltype(read()) {
    try {
      return read();
    } catch (const Error& error) {
      if (!is_damage(error) && !(of_any_run && error.code() == Code::run_mismatch)) throw;
      warn(error.what());
      return {};
    }
  }
};

// What a training does with the records of a run, as errors say it.
struct Goal {
  explicit Goal(const std::string& name) : run(name), what(fmt::format("resume run \"{}\"", name)) {}
  // `purpose` is another one than to resume, and `advice` what to do where that is not possible.
  Goal(std::string name, std::string purpose, std::string advice)
      : run(std::move(name)), what(std::move(purpose)), advice_(std::move(advice)) {}

  bool resumes() const { return advice_.empty(); }

  // What to do with records that do not fit, or are not whole.
  std::string remedy(const std::string& to_resume) const { return resumes() ? to_resume : advice_; }

  std::string run;
  std::string what;

 private:
  std::string advice_{};
};

// The run of a training as this rank keeps it on its drives.
struct OwnRun : RunDrives {
  const CompiledPlan& plan;
  std::string description{};     // the manifest of the run
  offload::RecordShape shape{};  // the shape of this rank's records
  Goal goal{options.run};

  std::size_t rank() const { return shape.rank; }
  // The commit after which none counts.
  offload::CommitPoint last() const {
    const auto& point = options.resume_at;
    return point ? offload::CommitPoint{point->incarnation, point->number} : last_of_all;
  }
};

}  // namespace ballast
