#include "offload/directory_lock.h"

#include <ballast/error.h>

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "offload/file.h"
#include "offload/own_files.h"

namespace ballast::offload {
namespace {

// The text for a process that finds the directory locked.
std::string text_of_this_process() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return fmt::format("process {} on {}, since {:%Y-%m-%d %H:%M:%S} UTC\n", ::getpid(), host.data(),
                     fmt::gmtime(std::time(nullptr)));
}

std::string holder_of(int file) {
  std::array<char, 512> text{};
  const ssize_t read = ::pread(file, text.data(), text.size(), 0);
  std::string_view name(text.data(), read > 0 ? static_cast<std::size_t>(read) : 0);
  if (name.ends_with('\n')) name.remove_suffix(1);
  return name.empty() ? "a process that has not written its name" : std::string(name);
}

[[noreturn]] void fail_to_lock(int file, const std::filesystem::path& directory, int error) {
  switch (error) {
    case EWOULDBLOCK:
      fail(Code::directory_in_use,
           {.what = fmt::format("cannot lock the directory: it is in use by {}", holder_of(file)),
            .where = directory.string()});
    case ENOLCK:
    case ENOSYS:
    case EOPNOTSUPP:
      fail(Code::no_file_locks,
           {.what = fmt::format("cannot lock the directory: {}", std::generic_category().message(error)),
            .where = directory.string()});
    default: fail_file("flock", directory / lock_name, 0, error);
  }
}

void lock(int file, const std::filesystem::path& directory) {
  if (::flock(file, LOCK_EX | LOCK_NB) != 0) fail_to_lock(file, directory, errno);
  const std::string text = text_of_this_process();
  const bool is_written = ::ftruncate(file, 0) == 0 && ::pwrite(file, text.data(), text.size(), 0) > 0;
  if (!is_written) fail_file("write", directory / lock_name, 0, errno);  // a full drive would not hold the state either
}

}  // namespace

DirectoryLock::DirectoryLock(const std::filesystem::path& directory) : holder_(::getpid()) {
  const auto name = directory / lock_name;
  // Opened for writing, because NFS gives no exclusive lock on a read-only descriptor.
  file_ = open_own_file(name, O_RDWR | O_CREAT);
  try {
    kept_from_children_ = std::make_unique<NotInChildren>(file_);
    lock(file_, directory);
  } catch (...) {
    kept_from_children_.reset();
    ::close(file_);
    throw;
  }
}

DirectoryLock::DirectoryLock(DirectoryLock&& other) noexcept
    : file_(std::exchange(other.file_, -1)),
      kept_from_children_(std::move(other.kept_from_children_)),
      holder_(other.holder_) {}

DirectoryLock::~DirectoryLock() { release(); }

void DirectoryLock::release() noexcept {
  if (file_ < 0) return;
  // A child that was made without fork()'s handlers may have the file open; closing alone would leave it locked.
  if (holder_ == ::getpid()) ::flock(file_, LOCK_UN);
  kept_from_children_.reset();
  ::close(std::exchange(file_, -1));  // the file stays: removing it could remove another process's lock
}

}  // namespace ballast::offload
