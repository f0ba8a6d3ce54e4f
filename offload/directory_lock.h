// A lock on a directory that one process uses at a time.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <memory>

#include "kernels/runtime/not_in_children.h"

namespace ballast::offload {

inline constexpr const char* lock_name = "ballast.lock";

// Holds the directory's `ballast.lock` from construction to release. The kernel unlocks it when the process ends in any
// way. Forked children that are still running do not keep the lock and cannot release it, because they do not get its
// descriptor.
class DirectoryLock {
 public:
  // The directory must exist. Throws B2204, with the holder's name, if it is in use, B2205 on a file system without locks,
  // and B2206 if the lock's file may be another user's.
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
