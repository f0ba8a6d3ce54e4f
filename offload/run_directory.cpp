#include "offload/run_directory.h"

#include <sys/stat.h>

#include <cerrno>

#include "offload/file.h"
#include "offload/own_files.h"

namespace ballast::offload {
namespace {

const std::filesystem::path& made(const std::filesystem::path& path) {
  std::error_code failed;
  std::filesystem::create_directories(path.parent_path(), failed);
  const bool is_new = ::mkdir(path.c_str(), 0700) == 0;
  if (!is_new && errno != EEXIST) fail_file("mkdir", path, 0, errno);
  require_own_directory(path);
  if (is_new)
    flush_directory(path.has_parent_path() ? path.parent_path() : ".");  // else a crash could lose the directory
  return path;
}

}  // namespace

RunDirectory::RunDirectory(const std::filesystem::path& path) : path_(path), lock_(made(path)) {}

}  // namespace ballast::offload
