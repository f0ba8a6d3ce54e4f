// The checks of drives before a long run keeps its state there: their properties, their speed, and their space.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "offload/io_queue.h"
#include "offload/record_format.h"

namespace ballast::offload {

// --- Space, before anything is written ---

// The device of a directory: a drive, or a part of one. Throws B3201.
dev_t device_of(const std::filesystem::path& directory);

// The bytes that stores need on one drive, and those that it has.
struct SpaceNeed {
  dev_t device = 0;
  std::filesystem::path directory{};  // the first one on the drive
  std::uint64_t needed = 0;
  std::uint64_t available = 0;
};

// Returns the needs of each drive for `stores` stores of this shape, each striped over all directories.
std::vector<SpaceNeed> space_needs(const RecordShape& shape, std::span<const std::filesystem::path> directories,
                                   std::size_t stores);

// Throws B2202 if `stores` stores of this shape, each striped over all directories, do not fit. Several directories may
// share a drive.
void require_space(const RecordShape& shape, std::span<const std::filesystem::path> directories, std::size_t stores);

// Throws B2202 if this process may not write a file of this size: the kernel would kill it (RLIMIT_FSIZE).
void require_allowed(std::uint64_t file_bytes, const std::filesystem::path& directory);

// --- Properties and speed, measured ---

struct DriveReport {
  std::filesystem::path directory;
  std::string file_system;
  bool is_network = false;
  std::uint64_t free_bytes = 0;
  std::string buffered_because{};  // empty: direct I/O works
  std::string queue{};
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;
  double both_bytes_per_second = 0;  // read and written at the same time, added up: the speed of an update
};

struct Probe {
  std::size_t bytes = std::size_t{256} << 20;  // written and read in a nameless file
  std::size_t request_bytes = std::size_t{4} << 20;
  FileOptions file{};
};

// Measures for about a second.
DriveReport inspect(const std::filesystem::path& directory, IoQueue& queue, const Probe& probe = {});

}  // namespace ballast::offload
