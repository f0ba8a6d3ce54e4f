// The checks that files will fit, before anything is written.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <span>
#include <vector>

#include "offload/record_format.h"

namespace ballast::offload {

// The device of a directory: a drive, or a part of one. Throws B3201.
dev_t device_of(const std::filesystem::path& directory);

// The bytes that stores need on one drive, and those that it has.
struct SpaceNeed {
  dev_t device = 0;
  std::filesystem::path directory{};  // the first one on the drive
  std::uint64_t needed = 0;
  std::uint64_t available = 0;
};

// By drive, of `stores` stores of this shape, each striped over all directories.
std::vector<SpaceNeed> space_needs(const RecordShape& shape, std::span<const std::filesystem::path> directories,
                                   std::size_t stores);

// Throws B2202 if `stores` stores of this shape, each striped over all directories, do not fit. Several directories may
// share a drive.
void require_space(const RecordShape& shape, std::span<const std::filesystem::path> directories, std::size_t stores);

// Throws B2202 if this process may not write a file of this size: the kernel would kill it (RLIMIT_FSIZE).
void require_allowed(std::uint64_t file_bytes, const std::filesystem::path& directory);

}  // namespace ballast::offload
