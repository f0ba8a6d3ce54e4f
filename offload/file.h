// An open file on a drive, and the requirements of its file system.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <istream>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/runtime/system_resources.h"

namespace ballast::offload {

// The file system of a path.
struct FileSystem {
  std::string name;      // "ext4", or the number that statfs(2) gives
  bool network = false;  // slow, and a lost server blocks the process
};

FileSystem file_system(std::uint32_t statfs_type);

// A file system of FUSE: statfs(2) does not tell sshfs from a drive, but the type of its mount does. `mounts` has the lines
// of /proc/self/mountinfo. Only fuseblk is local: "fuse.sshfs", "virtiofs" and the others may lie on another machine.
FileSystem fuse_file_system(std::istream& mounts, dev_t device);

FileSystem file_system_of(const std::filesystem::path& path);

// Throws B2203 for a network file system.
void require_local(const FileSystem& found, const std::filesystem::path& directory);

// What statx(2) tells of a file: the units of direct I/O in the file and in memory; 0 and 0 if there is none.
struct DirectIoUnits {
  std::size_t in_file = 0;
  std::size_t in_memory = 0;
};

// Returns why a file does not support direct I/O in blocks of block_bytes; empty if it does. Some file systems tell the units,
// since Linux 6.1. Where they do not, `try_block` moves one block and returns the errno, or 0.
std::string direct_io_obstacle(const std::optional<DirectIoUnits>& units, const std::function<int()>& try_block);

// Begins direct I/O on an open file, and returns the same. A new file is empty before and after.
std::string begin_direct_io(int descriptor, bool is_new);

inline constexpr std::size_t block_bytes = 4096;  // the unit of direct I/O that works on all known drives

struct FileOptions {
  bool create = false;         // a new file; an existing one is an error
  bool direct = true;          // bypass the page cache if the file system supports it
  bool allow_network = false;  // network file systems are slow, and a lost server blocks the process
  bool writable = true;
  mode_t mode = 0600;  // of a new file: readable by its user only
};

// Owns the descriptor. It does no I/O on the content: an IoQueue does.
class File {
 public:
  explicit File(const std::filesystem::path& path, const FileOptions& options = {});

  // Creates a file without a name. The kernel removes it when the last process that has it open ends, in any way.
  static File nameless(const std::filesystem::path& directory, const FileOptions& options = {});

  File(File&&) noexcept = default;
  File& operator=(File&&) = delete;

  const std::filesystem::path& path() const { return path_; }
  int descriptor() const { return descriptor_.get(); }
  std::uint64_t bytes() const;  // current size
  bool has_name() const;        // false if it was removed: it disappears with the process
  void rename(const std::filesystem::path& to);

  // Direct I/O moves whole blocks, to and from memory that is aligned to block_bytes.
  bool direct() const { return buffered_because_.empty(); }
  const std::string& buffered_because() const { return buffered_because_; }

 private:
  File(std::filesystem::path path, Descriptor descriptor)
      : path_(std::move(path)), descriptor_(std::move(descriptor)) {}

  std::filesystem::path path_;
  Descriptor descriptor_;
  std::string buffered_because_ = "it is requested";
};

// Makes new and removed names in the directory durable.
void flush_directory(const std::filesystem::path& directory);

// Throws B3201, or B2202 where the drive is full; `error` is an errno. Names the owner of a directory of another user that is
// the reason, and the byte at which a read or a write failed.
[[noreturn]] void fail_file(std::string_view operation, const std::filesystem::path& path, int error,
                            std::optional<std::uint64_t> offset = {});

// The name of a file that is being made. After a crash the next attempt removes files of this name.
inline constexpr std::string_view unfinished_end = ".unfinished";
inline std::filesystem::path unfinished(std::filesystem::path name) { return name += unfinished_end; }

// Names for files that are unlinked directly after they are created.
std::string scratch_name();  // a new name at each call

// Removes such names that a crash has left, and returns how many it removed. It is harmless to remove the name of a
// file that another process is creating.
std::size_t remove_stale_scratch(const std::filesystem::path& directory);

}  // namespace ballast::offload
