#include "offload/file.h"

#include <ballast/error.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <system_error>
#include <utility>

#include "kernels/runtime/system_limits.h"
#include "offload/direct_io.h"
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

}  // namespace

void fail_file(std::string_view operation, const std::filesystem::path& path, std::uint64_t offset, int error) {
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
          .where = fmt::format("{}, byte {}", path.string(), offset),
          .available = limits_behind(error),
          .remedy = "Raise the limit on the size of files (`ulimit -f`), or name another file system."});
  }
  const bool full = error == ENOSPC || error == EDQUOT;
  fail(full ? Code::drive_full : Code::file_call,
       {.what = fmt::format("{} failed: {}", operation, std::generic_category().message(error)),
        .where = fmt::format("{}, byte {}", path.string(), offset)});
}

File::File(const std::filesystem::path& path, const FileOptions& options) : File(path, open_file(path, options)) {
  if (options.direct) buffered_because_ = begin_direct_io(descriptor_, options.create);
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
  if (options.direct) file.buffered_because_ = begin_direct_io(file.descriptor_, true);
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
