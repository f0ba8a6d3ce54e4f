// The directory of a named run. Its state outlives the process; one process uses it at a time.
#pragma once

#include <filesystem>

#include "offload/directory_lock.h"

namespace ballast::offload {

// Holds the directory's lock from construction to destruction.
class RunDirectory {
 public:
  // Creates a missing directory, accessible to its user only, and locks it as DirectoryLock does. Throws
  // B2206 if it may be another user's.
  explicit RunDirectory(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  DirectoryLock lock_;
};

}  // namespace ballast::offload
