#include "zero/checkpoint/directory.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "kernels/runtime/sizes.h"
#include "offload/file.h"
#include "zero/checkpoint/files.h"

namespace ballast {
namespace {

void require_own(const std::filesystem::path& path) {
  struct stat found {};
  if (::stat(path.c_str(), &found) != 0) offload::fail_file("stat", path, errno);
  constexpr uid_t root = 0;  // root's directories may be used: in a container those of its host belong to others
  const bool is_own = ::geteuid() == root || found.st_uid == ::geteuid() || found.st_uid == root;
  require(is_own, Code::foreign_file, [&] {
    return Problem{
        .what = fmt::format("cannot write there: it belongs to user {}, not to {}", found.st_uid, ::geteuid()),
        .where = path.string()};
  });
}

}  // namespace

void make_directories(const std::filesystem::path& path) {
  const std::filesystem::path parent = path.has_parent_path() ? path.parent_path() : ".";
  int failed = ::mkdir(path.c_str(), 0777) == 0 ? 0 : errno;
  if (failed == ENOENT && parent != path) {
    make_directories(parent);
    failed = ::mkdir(path.c_str(), 0777) == 0 ? 0 : errno;
  }
  if (failed == 0) return offload::flush_directory(parent);
  if (!std::filesystem::is_directory(path)) offload::fail_file("mkdir", path, failed);
}

void require_space(const std::filesystem::path& directory, std::uint64_t needed) {
  std::error_code unknown;
  const std::uint64_t available = std::filesystem::space(directory, unknown).available;
  require(needed <= available, Code::drive_full, [&] {
    return Problem{.what = "cannot save the files: they do not fit on the drive",
                   .where = directory.string(),
                   .needed = human_bytes(needed),
                   .available = human_bytes(available),
                   .remedy = "Free space, or save to another drive. Files that are there already stay as they are."};
  });
}

CheckpointDirectory::CheckpointDirectory(const std::filesystem::path& path)
    : path_(path.has_filename() ? path : path.parent_path()) {
  make_directories(path_);
  require_own(path_);
  try {
    lock_.emplace(path_);
  } catch (const Error& error) {
    if (error.code() != Code::no_file_locks) throw;
    unlocked_because_ = error.problem().what;
  }
}

std::string CheckpointDirectory::warning() const {
  if (unlocked_because_.empty()) return "";
  return fmt::format(
      "{}; nothing prevents two jobs from saving to {} at once, and folders of stopped savings are not removed",
      unlocked_because_, path_.string());
}

std::string CheckpointDirectory::require_same_history(const std::set<std::string>& known,
                                                      const std::set<std::string>& ours) const {
  std::string there = current().value_or("");
  require(known.empty() || there.empty() || ours.contains(there), Code::directory_in_use, [&] {
    const std::string step = there.substr(0, there.rfind('-')).substr(there.find('-') + 1);
    return Problem{.what = fmt::format(
                       "cannot save: another job has saved step {} here since this training saved or loaded", step),
                   .where = path_.string(),
                   .needed = "one job that saves to a directory",
                   .remedy =
                       "Stop the other job, or save to another directory. To resume from the checkpoint that is "
                       "there, load it; to replace it, remove it first."};
  });
  return there;
}

void CheckpointDirectory::create(const std::string& folder) {
  remove_stale();
  if (::mkdir((path_ / folder).c_str(), 0700) != 0) offload::fail_file("mkdir", path_ / folder, errno);
}

void CheckpointDirectory::make_current(const std::string& folder, const std::string& manifest) {
  replaced_ = current().value_or("");
  const std::filesystem::path written = path_ / folder / manifest_name;
  offload::flush_directory(path_);
  offload::write_text(written, manifest);
  std::error_code failed;
  std::filesystem::rename(written, path_ / manifest_name, failed);
  if (failed) offload::fail_file("rename", written, failed.value());
  offload::flush_directory(path_);
}

void CheckpointDirectory::remove_stale() const {
  const auto named = current();
  if (!named) return;      // everything stays until a saving has replaced the manifest
  std::error_code failed;  // the next saving removes what stays
  for (std::filesystem::directory_iterator entry(path_, failed), end; !failed && entry != end;
       entry.increment(failed)) {
    const std::string name = entry->path().filename().string();
    const bool is_stale = unlocked_because_.empty() || name == replaced_;  // else another job may write to it
    std::error_code stays;
    if (is_folder(name) && name != *named && is_stale) std::filesystem::remove_all(entry->path(), stays);
  }
}

void CheckpointDirectory::discard(const std::string& folder) const {
  const auto named = current();
  std::error_code failed;
  if (named && *named != folder) std::filesystem::remove_all(path_ / folder, failed);
}

std::optional<std::string> CheckpointDirectory::current() const {
  try {
    return current_folder(path_);
  } catch (const Error&) {
    return {};
  }
}

}  // namespace ballast
