// The file system of a path.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <istream>
#include <string>

namespace ballast::offload {

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

}  // namespace ballast::offload
