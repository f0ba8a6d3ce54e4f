// The directory of a run that is kept: state that outlives the process, used by one process at a time.
#pragma once

#include <filesystem>

#include "offload/directory_lock.h"

namespace ballast::offload {

// Locked while it lives.
class RunDirectory {
 public:
  // Makes the directory if it is not there, for its user alone, and locks it as DirectoryLock does.
  explicit RunDirectory(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  DirectoryLock lock_;
};

}  // namespace ballast::offload
