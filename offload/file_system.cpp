#include "offload/file_system.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <sstream>

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
    KnownFileSystem{0x2fc12fc1, "zfs", false},
    KnownFileSystem{NFS_SUPER_MAGIC, "nfs", true},
    KnownFileSystem{0xff534d42, "cifs", true},
    KnownFileSystem{0xfe534d42, "smb2", true},
    KnownFileSystem{V9FS_MAGIC, "9p", true},
    KnownFileSystem{CEPH_SUPER_MAGIC, "ceph", true},
    KnownFileSystem{0x0bd00bd0, "lustre", true},
    KnownFileSystem{0x47504653, "gpfs", true},
    KnownFileSystem{AFS_SUPER_MAGIC, "afs", true},
    KnownFileSystem{0x6b414653, "afs", true},  // the kernel's own
    KnownFileSystem{0x19830326, "beegfs", true},
    KnownFileSystem{0xaad7aaea, "panfs", true},
    KnownFileSystem{0xbacbacbc, "vmhgfs", true},
    KnownFileSystem{0x01161970, "gfs2", true},
    KnownFileSystem{0x7461636f, "ocfs2", true},
    KnownFileSystem{FUSE_SUPER_MAGIC, "fuse", true},  // see fuse_file_system()
};

// Types of FUSE with files on this machine's drives. All others may be on a network.
constexpr std::array<std::string_view, 6> local_fuse{
    "fuseblk", "fuse.bindfs", "fuse.encfs", "fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.mergerfs"};

// Returns the type of the mount of this device, or nothing. A line of `mounts` is, up to optional fields:
// 36 35 98:0 /root /mount/point options [optional fields] - type source options
std::string mount_type(std::istream& mounts, const std::string& device) {
  constexpr std::string_view separator = " - ";
  for (std::string line; std::getline(mounts, line);) {
    std::string mount, parent, found, type;
    std::istringstream(line) >> mount >> parent >> found;
    const std::size_t end = line.find(separator);
    if (found != device || end == std::string::npos) continue;
    std::istringstream(line.substr(end + separator.size())) >> type;
    return type;
  }
  return {};
}

}  // namespace

FileSystem file_system(std::uint32_t statfs_type) {
  const auto* found = std::ranges::find(known_file_systems, statfs_type, &KnownFileSystem::magic);
  if (found == known_file_systems.end()) return {fmt::format("file system {:#x}", statfs_type)};
  return {std::string(found->name), found->network};
}

FileSystem fuse_file_system(std::istream& mounts, dev_t device) {
  const std::string type = mount_type(mounts, fmt::format("{}:{}", major(device), minor(device)));
  return {type.empty() ? "fuse" : type, std::ranges::find(local_fuse, type) == local_fuse.end()};
}

FileSystem file_system_of(const std::filesystem::path& path) {
  struct statfs found {};
  if (::statfs(path.c_str(), &found) != 0) fail_file("statfs", path, 0, errno);
  if (found.f_type != FUSE_SUPER_MAGIC) return file_system(static_cast<std::uint32_t>(found.f_type));
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) fail_file("stat", path, 0, errno);
  std::ifstream mounts("/proc/self/mountinfo");
  return fuse_file_system(mounts, status.st_dev);
}

void require_local(const FileSystem& found, const std::filesystem::path& directory) {
  require(!found.network, Code::network_drive, [&] {
    return Problem{.what = fmt::format("cannot use the directory: it lies on a network file system ({})", found.name),
                   .where = directory.string(),
                   .needed = "a drive of this machine"};
  });
}

}  // namespace ballast::offload
