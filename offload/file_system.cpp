#include "offload/file_system.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/statfs.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "offload/file.h"

namespace ballast::offload {
namespace {

struct KnownFileSystem {
  std::uint32_t magic;
  std::string_view name;
  bool network;
};

// All other file systems are treated as local.
constexpr std::array known_file_systems{
    KnownFileSystem{EXT4_SUPER_MAGIC, "ext4", false},
    KnownFileSystem{XFS_SUPER_MAGIC, "xfs", false},
    KnownFileSystem{BTRFS_SUPER_MAGIC, "btrfs", false},
    KnownFileSystem{TMPFS_MAGIC, "tmpfs", false},
    KnownFileSystem{OVERLAYFS_SUPER_MAGIC, "overlay", false},
    KnownFileSystem{FUSE_SUPER_MAGIC, "fuse", false},
    KnownFileSystem{0x2fc12fc1, "zfs", false},
    KnownFileSystem{NFS_SUPER_MAGIC, "nfs", true},
    KnownFileSystem{0xff534d42, "cifs", true},
    KnownFileSystem{0xfe534d42, "smb2", true},
    KnownFileSystem{V9FS_MAGIC, "9p", true},
    KnownFileSystem{CEPH_SUPER_MAGIC, "ceph", true},
    KnownFileSystem{0x0bd00bd0, "lustre", true},
    KnownFileSystem{0x47504653, "gpfs", true},
    KnownFileSystem{AFS_SUPER_MAGIC, "afs", true},
};

}  // namespace

FileSystem file_system(std::uint32_t statfs_type) {
  const auto* found = std::ranges::find(known_file_systems, statfs_type, &KnownFileSystem::magic);
  if (found == known_file_systems.end()) return {fmt::format("file system {:#x}", statfs_type)};
  return {std::string(found->name), found->network};
}

FileSystem file_system_of(const std::filesystem::path& path) {
  struct statfs found {};
  if (::statfs(path.c_str(), &found) != 0) fail_file("statfs", path, 0, errno);
  return file_system(static_cast<std::uint32_t>(found.f_type));
}

void require_local(const FileSystem& found, const std::filesystem::path& directory) {
  require(!found.network, Code::network_drive, [&] {
    return Problem{.what = fmt::format("cannot use the directory: it lies on a network file system ({})", found.name),
                   .where = directory.string(),
                   .needed = "a drive of this machine"};
  });
}

}  // namespace ballast::offload
