#include "offload/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "kernels/runtime/error.h"
#include "offload/scratch.h"

namespace ballast::offload {
namespace {

struct KnownFileSystem {
  std::uint32_t magic;
  std::string_view name;
  bool network;
};

// Of the others nothing needs to be known.
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

const KnownFileSystem* known(std::uint32_t magic) {
  const auto* found = std::ranges::find(known_file_systems, magic, &KnownFileSystem::magic);
  return found == known_file_systems.end() ? nullptr : found;
}

std::uint32_t magic_of(const std::filesystem::path& path) {
  struct statfs found {};
  if (::statfs(path.c_str(), &found) != 0) fail_file("statfs", path, 0, errno);
  return static_cast<std::uint32_t>(found.f_type);
}

int open_or_fail(const std::filesystem::path& path, int flags) {
  const int descriptor = ::open(path.c_str(), flags | O_RDWR | O_CLOEXEC, 0600);
  if (descriptor < 0) fail_file("open", path, 0, errno);
  return descriptor;
}

// Why direct I/O in our blocks is impossible on the file; empty if it is not.
std::string no_direct_io(int descriptor) {
  const int flags = ::fcntl(descriptor, F_GETFL);
  if (::fcntl(descriptor, F_SETFL, flags | O_DIRECT) != 0) {
    return fmt::format("the file system has no direct I/O ({})", std::generic_category().message(errno));
  }
#ifdef STATX_DIOALIGN
  struct statx asked {};
  const bool told =
      ::statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &asked) == 0 && (asked.stx_mask & STATX_DIOALIGN) != 0;
  const bool too_coarse = asked.stx_dio_offset_align > block_bytes || asked.stx_dio_mem_align > block_bytes;
  if (told && (asked.stx_dio_offset_align == 0 || too_coarse)) {
    ::fcntl(descriptor, F_SETFL, flags);
    return too_coarse ? fmt::format("direct I/O needs blocks of {} bytes here", asked.stx_dio_offset_align)
                      : "the file system has no direct I/O on this file";
  }
#endif
  return {};
}

}  // namespace

void fail_file(std::string_view operation, const std::filesystem::path& path, std::uint64_t offset, int error) {
  const bool full = error == ENOSPC || error == EDQUOT;
  fail(full ? Code::drive_full : Code::file_call,
       {.what = fmt::format("{} failed: {}", operation, std::generic_category().message(error)),
        .where = fmt::format("{}, byte {}", path.string(), offset)});
}

std::string file_system_of(const std::filesystem::path& path) {
  const std::uint32_t magic = magic_of(path);
  const KnownFileSystem* found = known(magic);
  return found != nullptr ? std::string(found->name) : fmt::format("file system {:#x}", magic);
}

File::File(const std::filesystem::path& path, const FileOptions& options)
    : File(path, open_or_fail(path, options.create ? O_CREAT | O_EXCL : 0)) {
  settle(options);
}

File File::nameless(const std::filesystem::path& directory, const FileOptions& options) {
  const int descriptor = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (descriptor < 0 && errno != EOPNOTSUPP && errno != EISDIR) fail_file("open", directory, 0, errno);
  File file(directory / "(no name)", descriptor);
  if (descriptor < 0) {  // the file system knows no such files: one with a name for a moment
    const auto name = directory / scratch_name();
    file.descriptor_ = open_or_fail(name, O_CREAT | O_EXCL);
    ::unlink(name.c_str());
  }
  file.settle(options);
  return file;
}

void File::settle(const FileOptions& options) {
  const KnownFileSystem* found = known(magic_of(path_.parent_path().empty() ? "." : path_.parent_path()));
  require(found == nullptr || !found->network || options.allow_network, Code::network_drive, [&] {
    return Problem{.what = fmt::format("the directory lies on a network file system ({})", found->name),
                   .where = path_.parent_path().string(),
                   .needed = "a drive of this machine"};
  });
  buffered_because_ = options.direct ? no_direct_io(descriptor_) : "it was asked for";
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      buffered_because_(std::move(other.buffered_because_)) {}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

std::uint64_t File::bytes() const {
  struct stat found {};
  if (::fstat(descriptor_, &found) != 0) fail_file("fstat", path_, 0, errno);
  return static_cast<std::uint64_t>(found.st_size);
}

void flush_directory(const std::filesystem::path& directory) {
  const int descriptor = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const int result = descriptor < 0 ? -1 : ::fsync(descriptor);
  const int error = errno;
  if (descriptor >= 0) ::close(descriptor);
  if (result != 0) fail_file("fsync", directory, 0, error);
}

}  // namespace ballast::offload
