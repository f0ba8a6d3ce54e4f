#include "offload/run_directory.h"

#include <ballast/error.h>

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <span>
#include <system_error>

namespace ballast::offload {

namespace {

constexpr uid_t root = 0;

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& why) {
  fail(Code::foreign_file, {.what = "cannot write there: " + why, .where = path.string()});
}

std::string other_user(uid_t owner) { return fmt::format("it belongs to user {}, not to {}", owner, ::geteuid()); }

// The text for a process that finds the directory locked.
std::string name_of_this_process() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return fmt::format("process {} on {}", ::getpid(), host.data());
}

std::string text_of_this_process() {
  return fmt::format("{}, since {:%Y-%m-%d %H:%M:%S} UTC\n", name_of_this_process(), fmt::gmtime(std::time(nullptr)));
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
    case EWOULDBLOCK: {
      const std::string holder = holder_of(file);
      const bool is_own = holder.starts_with(name_of_this_process() + ",");
      fail(Code::directory_in_use,
           {.what = fmt::format("cannot lock the directory: it is in use by {}", holder),
            .where = directory.string(),
            .remedy =
                is_own ? "That is this process. End the training that uses it, and keep nothing of one that has ended: "
                         "no state_dict() of its optimizer, for example."
                       : ""});
    }
    case ENOLCK:
    case ENOSYS:
    case EOPNOTSUPP:
      fail(Code::no_file_locks,
           {.what = fmt::format("cannot lock the directory: {}", std::generic_category().message(error)),
            .where = directory.string()});
    default: fail_file("flock", directory / lock_name, error);
  }
}

void lock(int file, const std::filesystem::path& directory) {
  if (::flock(file, LOCK_EX | LOCK_NB) != 0) fail_to_lock(file, directory, errno);
  const std::string text = text_of_this_process();
  const bool is_written = ::ftruncate(file, 0) == 0 && ::pwrite(file, text.data(), text.size(), 0) > 0;
  if (!is_written) fail_file("write", directory / lock_name, errno);  // a full drive would not hold the state either
}

const std::filesystem::path& made(const std::filesystem::path& path) {
  std::error_code failed;
  std::filesystem::create_directories(path.parent_path(), failed);
  const bool is_new = ::mkdir(path.c_str(), 0700) == 0;
  if (!is_new && errno != EEXIST) fail_file("mkdir", path, errno);
  require_own_directory(path);
  if (is_new)
    flush_directory(path.has_parent_path() ? path.parent_path() : ".");  // else a crash could lose the directory
  return path;
}

// Removes what a killed process has left.
File new_file(const std::filesystem::path& name, mode_t mode) {
  std::error_code none_there;
  std::filesystem::remove(name, none_there);
  return File(name, {.create = true, .direct = false, .allow_network = true, .mode = mode});
}

}  // namespace

Descriptor open_own_file(const std::filesystem::path& path, int flags) {
  // O_NONBLOCK: a named pipe would make the process wait for a reader.
  Descriptor file(::open(path.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
  if (!file && errno == ELOOP) refuse(path, "it is a link");
  if (!file && (errno == ENXIO || errno == EISDIR)) refuse(path, "it is no regular file");
  if (!file) fail_file("open", path, errno);
  struct stat found {};
  if (::fstat(file.get(), &found) != 0) fail_file("fstat", path, errno);
  if (!S_ISREG(found.st_mode)) refuse(path, "it is no regular file");
  if (found.st_nlink > 1) refuse(path, fmt::format("it is a file with {} names", found.st_nlink));
  if (found.st_uid != ::geteuid() && ::geteuid() != root) refuse(path, other_user(found.st_uid));
  return file;
}

void require_own_directory(const std::filesystem::path& directory) {
  struct stat found {};
  if (::lstat(directory.c_str(), &found) != 0) fail_file("lstat", directory, errno);
  if (S_ISLNK(found.st_mode)) refuse(directory, "it is a link");
  if (!S_ISDIR(found.st_mode)) refuse(directory, "it is no directory");
  if (found.st_uid != ::geteuid()) refuse(directory, other_user(found.st_uid));
  if ((found.st_mode & S_IWOTH) != 0) refuse(directory, "all users can change its files");
}

// Opened for writing, because NFS gives no exclusive lock on a read-only descriptor.
DirectoryLock::DirectoryLock(const std::filesystem::path& directory)
    : file_(open_own_file(directory / lock_name, O_RDWR | O_CREAT)),
      kept_from_children_(std::make_unique<NotInChildren>(file_.get())),
      holder_(::getpid()) {
  lock(file_.get(), directory);
}

void DirectoryLock::release() noexcept {
  if (!file_) return;
  // A child that was made without fork()'s handlers may have the file open; closing alone would leave it locked.
  if (holder_ == ::getpid()) ::flock(file_.get(), LOCK_UN);
  kept_from_children_.reset();
  file_ = Descriptor();  // the file stays: removing it could remove another process's lock
}

RunDirectory::RunDirectory(const std::filesystem::path& path) : DirectoryLock(made(path)) {}

NewFile::NewFile(std::filesystem::path name, mode_t mode)
    : name_(std::move(name)), file_(new_file(unfinished(name_), mode)) {}

NewFile::~NewFile() {
  if (file_.path() != name_) ::unlink(file_.path().c_str());
}

void NewFile::write(std::uint64_t begin, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t more = ::pwrite(file_.descriptor(), bytes.data(), bytes.size(), static_cast<off_t>(begin));
    if (more < 0 && errno != EINTR) fail_file("write", file_.path(), errno, begin);
    bytes.remove_prefix(more > 0 ? static_cast<std::size_t>(more) : 0);
    begin += more > 0 ? static_cast<std::uint64_t>(more) : 0;
  }
}

void NewFile::flush() {
  if (::fsync(file_.descriptor()) != 0) fail_file("fsync", file_.path(), errno);
}

void write_text(const std::filesystem::path& path, std::string_view text) {
  NewFile file(path);
  file.write(0, text);
  file.flush();
  file.keep();
  flush_directory(path.parent_path());
}

}  // namespace ballast::offload
