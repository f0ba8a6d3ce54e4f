#include "offload/own_files.h"

#include <ballast/error.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "kernels/runtime/descriptor.h"
#include "offload/file.h"

namespace ballast::offload {
namespace {

constexpr uid_t root = 0;

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& why) {
  fail(Code::foreign_file, {.what = "cannot write there: " + why, .where = path.string()});
}

std::string other_user(uid_t owner) { return fmt::format("it belongs to user {}, not to {}", owner, ::geteuid()); }

}  // namespace

int open_own_file(const std::filesystem::path& path, int flags) {
  // O_NONBLOCK: a named pipe would make the process wait for a reader.
  Descriptor file(::open(path.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
  if (!file && errno == ELOOP) refuse(path, "it is a link");
  if (!file && (errno == ENXIO || errno == EISDIR)) refuse(path, "it is no regular file");
  if (!file) fail_file("open", path, 0, errno);
  struct stat found {};
  if (::fstat(file.get(), &found) != 0) fail_file("fstat", path, 0, errno);
  if (!S_ISREG(found.st_mode)) refuse(path, "it is no regular file");
  if (found.st_nlink > 1) refuse(path, fmt::format("it is a file with {} names", found.st_nlink));
  if (found.st_uid != ::geteuid() && ::geteuid() != root) refuse(path, other_user(found.st_uid));
  return file.release();
}

void require_own_directory(const std::filesystem::path& directory) {
  struct stat found {};
  if (::lstat(directory.c_str(), &found) != 0) fail_file("lstat", directory, 0, errno);
  if (S_ISLNK(found.st_mode)) refuse(directory, "it is a link");
  if (!S_ISDIR(found.st_mode)) refuse(directory, "it is no directory");
  if (found.st_uid != ::geteuid()) refuse(directory, other_user(found.st_uid));
  if ((found.st_mode & S_IWOTH) != 0) refuse(directory, "all users can change its files");
}

}  // namespace ballast::offload
