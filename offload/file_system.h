// The file system of a path.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace ballast::offload {

struct FileSystem {
  std::string name;      // "ext4", or the number that statfs(2) gives
  bool network = false;  // slow, and a lost server blocks the process
};

FileSystem file_system(std::uint32_t statfs_type);
FileSystem file_system_of(const std::filesystem::path& path);

// Throws B2203 for a network file system.
void require_local(const FileSystem& found, const std::filesystem::path& directory);

}  // namespace ballast::offload
