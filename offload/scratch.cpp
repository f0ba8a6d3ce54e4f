#include "offload/scratch.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <string_view>

#include "offload/file.h"

namespace ballast::offload {
namespace {

constexpr std::string_view prefix = ".ballast-scratch-";

}  // namespace

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
  if (failed) fail_file("list", directory, 0, failed.value());
  for (const auto& entry : entries) {
    std::error_code gone_already;
    if (entry.path().filename().string().starts_with(prefix) && std::filesystem::remove(entry.path(), gone_already)) {
      ++removed;
    }
  }
  return removed;
}

}  // namespace ballast::offload
