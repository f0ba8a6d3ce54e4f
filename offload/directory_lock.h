// A directory that one process works in at a time.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <memory>

#include "kernels/runtime/not_in_children.h"

namespace ballast::offload {

// Holds the directory's `ballast.lock` from construction to release. The kernel unlocks it when the process ends, however
// it ends, also if children that it has forked live on: they do not get the lock's file, and nothing that they do here unlocks
// the directory.
class DirectoryLock {
 public:
  // The directory has to exist. In use: B2204, with the holder's own words. On a file system without locks: B2205.
  explicit DirectoryLock(const std::filesystem::path& directory);
  DirectoryLock(DirectoryLock&& other) noexcept;
  DirectoryLock& operator=(DirectoryLock&&) = delete;
  ~DirectoryLock();

  void release() noexcept;

 private:
  int file_ = -1;
  std::unique_ptr<NotInChildren> kept_from_children_;
  pid_t holder_;
};

}  // namespace ballast::offload
