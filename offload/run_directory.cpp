#include "offload/run_directory.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "kernels/runtime/error.h"
#include "offload/file.h"

namespace ballast::offload {
namespace {

constexpr const char* lock_name = "ballast.lock";

// For whoever finds the directory locked.
std::string who_we_are() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return fmt::format("process {} on {}, since {:%Y-%m-%d %H:%M:%S} UTC\n", ::getpid(), host.data(),
                     fmt::gmtime(std::time(nullptr)));
}

std::string holder(int lock) {
  std::array<char, 512> text{};
  const ssize_t read = ::pread(lock, text.data(), text.size(), 0);
  std::string_view said(text.data(), read > 0 ? static_cast<std::size_t>(read) : 0);
  if (said.ends_with('\n')) said.remove_suffix(1);
  return said.empty() ? "a process that has not said who it is" : std::string(said);
}

}  // namespace

RunDirectory::RunDirectory(const std::filesystem::path& path) : path_(path) {
  std::error_code failed;
  std::filesystem::create_directories(path.parent_path(), failed);
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) fail_file("mkdir", path, 0, errno);
  const auto name = path / lock_name;
  lock_ = ::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (lock_ < 0) fail_file("open", name, 0, errno);
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    const std::string by = holder(lock_);
    ::close(lock_);
    fail(Code::directory_in_use, {.what = fmt::format("the directory is in use by {}", by), .where = path.string()});
  }
  const std::string us = who_we_are();
  const bool said = ::ftruncate(lock_, 0) == 0 && ::pwrite(lock_, us.data(), us.size(), 0) > 0;
  if (!said) {  // a full drive: it would not hold our state either
    const int error = errno;
    ::close(lock_);
    fail_file("write", name, 0, error);
  }
}

RunDirectory::RunDirectory(RunDirectory&& other) noexcept
    : path_(std::move(other.path_)), lock_(std::exchange(other.lock_, -1)) {}

RunDirectory::~RunDirectory() {
  if (lock_ >= 0) ::close(lock_);  // which unlocks it; the file stays, for its removal could hit another's lock
}

}  // namespace ballast::offload
