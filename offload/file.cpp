#include "offload/file.h"

#include <ballast/error.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>
#include <system_error>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <string_view>
#include <utility>

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

std::optional<DirectIoUnits> told_units(int descriptor) {
  struct statx found {};
  const bool is_told =
      ::statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) == 0 && (found.stx_mask & STATX_DIOALIGN) != 0;
  if (!is_told) return {};
  return DirectIoUnits{.in_file = found.stx_dio_offset_align, .in_memory = found.stx_dio_mem_align};
}

// Only EINVAL says something of blocks: all other failures come back where the file is used.
int move_block(int descriptor, bool is_new) {
  struct alignas(block_bytes) Block {
    std::array<std::byte, block_bytes> bytes{};
  } block;
  void* const memory = block.bytes.data();
  const ssize_t moved =
      is_new ? ::pwrite(descriptor, memory, block_bytes, 0) : ::pread(descriptor, memory, block_bytes, 0);
  const int error = moved < 0 ? errno : 0;
  const bool is_changed = is_new && moved > 0;
  return is_changed && ::ftruncate(descriptor, 0) != 0 ? errno : error;
}

Descriptor open_or_fail(const std::filesystem::path& path, int flags, mode_t mode = 0600) {
  Descriptor descriptor(::open(path.c_str(), flags | O_CLOEXEC, mode));
  const bool is_link = !descriptor && errno == ELOOP && (flags & O_NOFOLLOW) != 0;
  if (is_link) fail(Code::foreign_file, {.what = "cannot write there: it is a link", .where = path.string()});
  if (!descriptor) fail_file("open", path, errno);
  return descriptor;
}

// Checks the directory before a file is created in it.
void check_place(const std::filesystem::path& directory, const FileOptions& options) {
  const std::filesystem::path place = directory.empty() ? "." : directory;
  if (!options.allow_network) require_local(file_system_of(place), place);
}

Descriptor open_file(const std::filesystem::path& path, const FileOptions& options) {
  check_place(path.parent_path(), options);
  const int flags = options.create ? O_CREAT | O_EXCL : 0;
  // A link may lead to a file that is not the caller's.
  return open_or_fail(path, flags | (options.writable ? O_RDWR | O_NOFOLLOW : O_RDONLY), options.mode);
}

// Returns the owner of the path, or of the nearest directory above it that this process can look at, if that is another user.
std::optional<std::pair<std::filesystem::path, uid_t>> other_owner(const std::filesystem::path& path) {
  std::error_code failed;
  std::filesystem::path place = std::filesystem::absolute(path, failed);
  struct stat found {};
  while (::stat(place.c_str(), &found) != 0) {
    if (place == place.root_path() || place.empty()) return {};
    place = place.parent_path();
  }
  if (found.st_uid == ::geteuid()) return {};
  return std::pair(place, found.st_uid);
}

constexpr std::string_view prefix = ".ballast-scratch-";

struct stat status_of(const File& file) {
  struct stat found {};
  if (::fstat(file.descriptor(), &found) != 0) fail_file("fstat", file.path(), errno);
  return found;
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
  if (::statfs(path.c_str(), &found) != 0) fail_file("statfs", path, errno);
  if (found.f_type != FUSE_SUPER_MAGIC) return file_system(static_cast<std::uint32_t>(found.f_type));
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) fail_file("stat", path, errno);
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

std::string direct_io_obstacle(const std::optional<DirectIoUnits>& units, const std::function<int()>& try_block) {
  if (!units) {
    return try_block() == EINVAL
               ? fmt::format("the drive or its file system refuses direct I/O in blocks of {} bytes", block_bytes)
               : std::string();
  }
  if (units->in_file == 0) return "the file system has no direct I/O on this file";
  if (units->in_file > block_bytes) return fmt::format("direct I/O needs blocks of {} bytes here", units->in_file);
  if (units->in_memory > block_bytes)
    return fmt::format("direct I/O needs memory that begins at a multiple of {} bytes here", units->in_memory);
  return {};
}

std::string begin_direct_io(int descriptor, bool is_new) {
  const int flags = ::fcntl(descriptor, F_GETFL);
  if (::fcntl(descriptor, F_SETFL, flags | O_DIRECT) != 0) {
    return fmt::format("the file system has no direct I/O ({})", std::generic_category().message(errno));
  }
  std::string obstacle = direct_io_obstacle(told_units(descriptor), [&] { return move_block(descriptor, is_new); });
  if (!obstacle.empty()) ::fcntl(descriptor, F_SETFL, flags);
  return obstacle;
}

void fail_file(std::string_view operation, const std::filesystem::path& path, int error,
               std::optional<std::uint64_t> offset) {
  const std::string where = path.string() + (offset ? fmt::format(", byte {}", *offset) : "");
  const bool is_refused = error == EACCES || error == EPERM;
  if (const auto owner = is_refused ? other_owner(path) : std::nullopt) {
    const auto& [place, user] = *owner;
    fail(Code::file_call,
         {.what = fmt::format("{} failed: {}: {} belongs to user {}, and this process runs as user {}", operation,
                              std::generic_category().message(error), place.string(), user, ::geteuid()),
          .where = path.string(),
          .remedy = fmt::format("Give it to user {} (`chown`), or name a directory that this user can write to.",
                                ::geteuid())});
  }
  if (is_descriptor_limit(error)) fail_limit(fmt::format("cannot {} {}", operation, path.string()), error);
  if (error == EFBIG) {
    fail(Code::drive_full,
         {.what = fmt::format("{} failed: the file would be larger than this process may write", operation),
          .where = where,
          .available = limits_behind(error),
          .remedy = "Raise the limit on the size of files (`ulimit -f`), or name another file system."});
  }
  const bool full = error == ENOSPC || error == EDQUOT;
  fail(full ? Code::drive_full : Code::file_call,
       {.what = fmt::format("{} failed: {}", operation, std::generic_category().message(error)), .where = where});
}

File::File(const std::filesystem::path& path, const FileOptions& options) : File(path, open_file(path, options)) {
  if (options.direct) buffered_because_ = begin_direct_io(descriptor(), options.create);
}

File File::nameless(const std::filesystem::path& directory, const FileOptions& options) {
  check_place(directory, options);
  Descriptor unnamed(::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (!unnamed && errno != EOPNOTSUPP && errno != EISDIR) fail_file("open", directory, errno);
  File file(directory / "(no name)", std::move(unnamed));
  if (!file.descriptor_) {  // the file system lacks nameless files: create one with a name, and unlink it
    const auto name = directory / scratch_name();
    file.descriptor_ = open_or_fail(name, O_RDWR | O_CREAT | O_EXCL);
    ::unlink(name.c_str());
  }
  if (options.direct) file.buffered_because_ = begin_direct_io(file.descriptor(), true);
  return file;
}

void File::rename(const std::filesystem::path& to) {
  if (::rename(path_.c_str(), to.c_str()) != 0) fail_file("rename", path_, errno);
  path_ = to;
}

std::uint64_t File::bytes() const { return static_cast<std::uint64_t>(status_of(*this).st_size); }

bool File::has_name() const { return status_of(*this).st_nlink > 0; }

void flush_directory(const std::filesystem::path& directory) {
  const Descriptor descriptor(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!descriptor || ::fsync(descriptor.get()) != 0) fail_file("fsync", directory, errno);
}

std::string scratch_name() {
  static std::atomic<unsigned> made{0};
  return fmt::format("{}{}-{}", prefix, ::getpid(), made++);
}

std::size_t remove_stale_scratch(const std::filesystem::path& directory) {
  std::size_t removed = 0;
  std::error_code failed;
  const std::filesystem::directory_iterator entries(directory, failed);
  require(failed != std::errc::no_such_file_or_directory, Code::file_call, [&] {
    return Problem{.what = "cannot keep records on a drive: there is no such directory",
                   .where = directory.string(),
                   .needed = "a directory that exists"};
  });
  if (failed) fail_file("list", directory, failed.value());
  for (const auto& entry : entries) {
    std::error_code gone_already;
    if (entry.path().filename().string().starts_with(prefix) && std::filesystem::remove(entry.path(), gone_already)) {
      ++removed;
    }
  }
  return removed;
}

}  // namespace ballast::offload
