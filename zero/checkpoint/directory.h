// The directory of a checkpoint while a job saves to it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>

#include "offload/run_directory.h"

namespace ballast {

// Makes a directory and its parents. Those that are made are on the drive when this returns. The parent of an existing one needs no
// permission to read it.
void make_directories(const std::filesystem::path& path);

// Throws B2202 unless the drive of a directory has so many free bytes.
void require_space(const std::filesystem::path& directory, std::uint64_t needed);

// A directory while one job saves to it. Rank 0 of the job uses it, and holds the directory's lock.
class CheckpointDirectory {
 public:
  // Makes the directory and its parents. Throws B2204 if another job saves to it.
  explicit CheckpointDirectory(const std::filesystem::path& path);

  std::string warning() const;  // says why it is not locked, and what follows; empty: it is

  std::optional<std::string> current() const;  // the folder that the manifest names; none if it cannot be read

  // Returns the current folder, or an empty text. Throws B2204 if another job has saved it: this training has saved or loaded the
  // `known` folders here, and it is not one of `ours`, which it had in any directory. Otherwise two jobs would take turns, and a
  // reader would get the state of either.
  std::string require_same_history(const std::set<std::string>& known, const std::set<std::string>& ours) const;

  // Makes a folder, and removes those of savings that were stopped.
  void create(const std::string& folder);
  // Replaces the manifest, once all ranks have written their files. Readers find the old checkpoint before, and the new one afterwards.
  void make_current(const std::string& folder, const std::string& manifest);
  // Removes the folders that the manifest does not name.
  void remove_stale() const;
  // Removes the files of a saving that failed, unless the manifest names them, or cannot be read.
  void discard(const std::string& folder) const;
  void release() noexcept { lock_.reset(); }

 private:
  std::filesystem::path path_;
  std::optional<offload::DirectoryLock> lock_{};
  std::string unlocked_because_{};
  std::string replaced_{};  // the folder of the checkpoint that the new one has replaced
};

}  // namespace ballast
