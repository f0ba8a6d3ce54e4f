#include "offload/drive_space.h"

#include <ballast/error.h>

#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "kernels/runtime/sizes.h"

namespace ballast::offload {

dev_t device_of(const std::filesystem::path& directory) {
  struct stat found {};
  if (::stat(directory.c_str(), &found) != 0) fail_file("stat", directory, 0, errno);
  return found.st_dev;
}

void require_allowed(std::uint64_t file_bytes, const std::filesystem::path& directory) {
  struct rlimit limit {};
  ::getrlimit(RLIMIT_FSIZE, &limit);
  require(limit.rlim_cur == RLIM_INFINITY || file_bytes <= limit.rlim_cur, Code::drive_full, [&] {
    return Problem{.what = "cannot make a file of this size: the limit on the size of files is too low",
                   .where = directory.string(),
                   .needed = human_bytes(file_bytes),
                   .available = human_bytes(limit.rlim_cur),
                   .remedy = "raise it (`ulimit -f`), or name more directories"};
  });
}

std::vector<SpaceNeed> space_needs(const RecordShape& shape, std::span<const std::filesystem::path> directories,
                                   std::size_t stores) {
  const RecordPlaces places(shape, directories.size());
  std::vector<SpaceNeed> needs;
  for (std::size_t i = 0; i < directories.size(); ++i) {
    const dev_t device = device_of(directories[i]);
    auto need = std::ranges::find(needs, device, &SpaceNeed::device);
    if (need == needs.end()) {
      const std::uint64_t available = std::filesystem::space(directories[i]).available;
      need = needs.insert(need, {.device = device, .directory = directories[i], .available = available});
    }
    need->needed += stores * places.file_bytes(i);
  }
  return needs;
}

void require_space(const RecordShape& shape, std::span<const std::filesystem::path> directories, std::size_t stores) {
  const RecordPlaces places(shape, directories.size());
  for (std::size_t i = 0; i < directories.size(); ++i)
    require_allowed(places.file_bytes(i), directories[i]);
  for (const SpaceNeed& need : space_needs(shape, directories, stores)) {
    require(need.needed <= need.available, Code::drive_full, [&] {
      return Problem{.what = "cannot make the state's files: the drive has too little space",
                     .where = need.directory.string(),
                     .needed = human_bytes(need.needed),
                     .available = human_bytes(need.available)};
    });
  }
}

}  // namespace ballast::offload
