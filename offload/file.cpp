#include "offload/file.h"

#include <ballast/error.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "kernels/runtime/system_limits.h"
#include "offload/file_system.h"
#include "offload/scratch.h"

namespace ballast::offload {
namespace {

int open_or_fail(const std::filesystem::path& path, int flags) {
  const int descriptor = ::open(path.c_str(), flags | O_CLOEXEC, 0600);
  const bool is_link = descriptor < 0 && errno == ELOOP && (flags & O_NOFOLLOW) != 0;
  if (is_link) fail(Code::foreign_file, {.what = "cannot write there: it is a link", .where = path.string()});
  if (descriptor < 0) fail_file("open", path, 0, errno);
  return descriptor;
}

// Checks the directory before a file is created in it.
void check_place(const std::filesystem::path& directory, const FileOptions& options) {
  const std::filesystem::path place = directory.empty() ? "." : directory;
  if (!options.allow_network) require_local(file_system_of(place), place);
}

int open_file(const std::filesystem::path& path, const FileOptions& options) {
  check_place(path.parent_path(), options);
  const int flags = options.create ? O_CREAT | O_EXCL : 0;
  // A link may lead to a file that is not the caller's.
  return open_or_fail(path, flags | (options.writable ? O_RDWR | O_NOFOLLOW : O_RDONLY));
}

// Returns why the file does not support direct I/O in blocks of block_bytes; empty if it does.
std::string no_direct_io(int descriptor) {
  const int flags = ::fcntl(descriptor, F_GETFL);
  if (::fcntl(descriptor, F_SETFL, flags | O_DIRECT) != 0) {
    return fmt::format("the file system has no direct I/O ({})", std::generic_category().message(errno));
  }
  struct statx asked {};
  const bool told =
      ::statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &asked) == 0 && (asked.stx_mask & STATX_DIOALIGN) != 0;
  const bool too_coarse = asked.stx_dio_offset_align > block_bytes || asked.stx_dio_mem_align > block_bytes;
  if (told && (asked.stx_dio_offset_align == 0 || too_coarse)) {
    ::fcntl(descriptor, F_SETFL, flags);
    return too_coarse ? fmt::format("direct I/O needs blocks of {} bytes here", asked.stx_dio_offset_align)
                      : "the file system has no direct I/O on this file";
  }
  return {};
}

}  // namespace

void fail_file(std::string_view operation, const std::filesystem::path& path, std::uint64_t offset, int error) {
  if (is_descriptor_limit(error)) fail_limit(fmt::format("cannot {} {}", operation, path.string()), error);
  const bool full = error == ENOSPC || error == EDQUOT;
  fail(full ? Code::drive_full : Code::file_call,
       {.what = fmt::format("{} failed: {}", operation, std::generic_category().message(error)),
        .where = fmt::format("{}, byte {}", path.string(), offset)});
}

File::File(const std::filesystem::path& path, const FileOptions& options) : File(path, open_file(path, options)) {
  if (options.direct) buffered_because_ = no_direct_io(descriptor_);
}

File File::nameless(const std::filesystem::path& directory, const FileOptions& options) {
  check_place(directory, options);
  const int descriptor = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (descriptor < 0 && errno != EOPNOTSUPP && errno != EISDIR) fail_file("open", directory, 0, errno);
  File file(directory / "(no name)", descriptor);
  if (descriptor < 0) {  // the file system lacks nameless files: create one with a name, and unlink it
    const auto name = directory / scratch_name();
    file.descriptor_ = open_or_fail(name, O_RDWR | O_CREAT | O_EXCL);
    ::unlink(name.c_str());
  }
  if (options.direct) file.buffered_because_ = no_direct_io(file.descriptor_);
  return file;
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      buffered_because_(std::move(other.buffered_because_)) {}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void File::rename(const std::filesystem::path& to) {
  if (::rename(path_.c_str(), to.c_str()) != 0) fail_file("rename", path_, 0, errno);
  path_ = to;
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
