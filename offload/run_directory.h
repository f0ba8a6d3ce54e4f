// The directory of a run that is kept: state that outlives the process, used by one process at a time.
#pragma once

#include <filesystem>
#include <string>

namespace ballast::offload {

// Locked while it lives; the kernel unlocks it when the process ends, however it ends.
class RunDirectory {
 public:
  // Makes the directory if it is not there, for its user alone. In use already: B2204, with the holder's own words.
  explicit RunDirectory(const std::filesystem::path& path);
  RunDirectory(RunDirectory&& other) noexcept;
  RunDirectory& operator=(RunDirectory&&) = delete;
  ~RunDirectory();

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  int lock_ = -1;
};

}  // namespace ballast::offload
