// The directory of a named run: who may use it, and its small text files. Its state outlives the process; one process uses it at a
// time.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "kernels/runtime/system_resources.h"
#include "offload/file.h"

namespace ballast::offload {

// The next two are for places where other users may have left links and files of the same names.
//
// Opens a file to write to it, as open() with these flags does; a new one is readable by its user only. Throws B2206, and leaves
// the file as it is, if it is a link, a hard link or no regular file, or if it belongs to another user and this process is not
// root's. Throws B3201 for other failures.
Descriptor open_own_file(const std::filesystem::path& path, int flags);

// Throws B2206 if the directory is a link, belongs to another user, or can be written to by all users.
void require_own_directory(const std::filesystem::path& directory);

// A lock on a directory that one process uses at a time.
inline constexpr const char* lock_name = "ballast.lock";

// Holds the directory's `ballast.lock` from construction to release. The kernel unlocks it when the process ends in any
// way. Forked children that are still running do not keep the lock and cannot release it, because they do not get its
// descriptor.
class DirectoryLock {
 public:
  // The directory must exist. Throws B2204, with the holder's name, if it is in use, B2205 on a file system without locks,
  // and B2206 if the lock's file may be another user's.
  explicit DirectoryLock(const std::filesystem::path& directory);
  DirectoryLock(DirectoryLock&&) noexcept = default;
  DirectoryLock& operator=(DirectoryLock&&) = delete;
  ~DirectoryLock() { release(); }

  void release() noexcept;

 private:
  Descriptor file_;
  std::unique_ptr<NotInChildren> kept_from_children_;
  pid_t holder_;
};

class RunDirectory : public DirectoryLock {
 public:
  // Creates a missing directory, accessible to its user only, and locks it. Throws B2206 if it may be another user's.
  explicit RunDirectory(const std::filesystem::path& path);
};

// A file that is written under a temporary name. It is removed unless it gets its own.
class NewFile {
 public:
  explicit NewFile(std::filesystem::path name, mode_t mode = 0600);
  NewFile(NewFile&&) = delete;
  ~NewFile();

  const std::filesystem::path& name() const { return name_; }

  void write(std::uint64_t begin, std::string_view bytes);
  void flush();                         // its bytes are on the drive when this returns
  void keep() { file_.rename(name_); }  // its name is on the drive after flush_directory()

 private:
  std::filesystem::path name_;
  File file_;
};

// Replaces a small text file, which is complete or absent after a crash or power loss at any moment. It is durable when this returns.
void write_text(const std::filesystem::path& path, std::string_view text);

}  // namespace ballast::offload
