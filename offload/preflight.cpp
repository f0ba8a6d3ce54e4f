#include "offload/preflight.h"

#include <ballast/error.h>

#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "kernels/runtime/host_pages.h"
#include "kernels/runtime/sizes.h"

namespace ballast::offload {

dev_t device_of(const std::filesystem::path& directory) {
  struct stat found {};
  if (::stat(directory.c_str(), &found) != 0) fail_file("stat", directory, errno);
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

DriveReport inspect(const std::filesystem::path& directory, IoQueue& queue, const Probe& probe) {
  const std::size_t requests = std::max<std::size_t>(2, probe.bytes / probe.request_bytes);
  const std::size_t bytes = requests * probe.request_bytes;
  const HostPages memory = map_host_pages(bytes, "preflight");
  const File file = File::nameless(directory, probe.file);
  std::fill_n(memory.get(), bytes, std::byte{0x5a});  // a drive may not store zeros
  // Returns the bytes per second of all requests at full speed; kind_of() chooses the kind of each.
  const auto run = [&](auto kind_of) {
    const auto start = std::chrono::steady_clock::now();
    InFlight in_flight;
    for (std::size_t i = 0; i < requests; ++i) {
      const std::size_t first = i * probe.request_bytes;
      in_flight.add(queue.submit({kind_of(i), &file, first, {memory.get() + first, probe.request_bytes}}));
    }
    in_flight.wait();
    queue.submit({IoKind::flush, &file, 0, {}}).wait();
    return static_cast<double>(bytes) / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const FileSystem found = file_system_of(directory);
  DriveReport report{.directory = directory,
                     .file_system = found.name,
                     .is_network = found.network,
                     .free_bytes = std::filesystem::space(directory).available,
                     .buffered_because = file.buffered_because(),
                     .queue = std::string(queue.kind())};
  run([](std::size_t) { return IoKind::write; });  // allocates the file's extents
  report.write_bytes_per_second = run([](std::size_t) { return IoKind::write; });
  report.read_bytes_per_second = run([](std::size_t) { return IoKind::read; });
  report.both_bytes_per_second = run([](std::size_t i) { return i % 2 == 0 ? IoKind::read : IoKind::write; });
  return report;
}

}  // namespace ballast::offload
