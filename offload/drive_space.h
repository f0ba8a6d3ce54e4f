// The checks that files will fit, before anything is written.
#pragma once

#include <filesystem>
#include <span>

#include "offload/record_format.h"

namespace ballast::offload {

// Throws B2202 if `stores` stores of this shape, each striped over all directories, do not fit. Several directories may
// share a drive.
void require_space(const RecordShape& shape, std::span<const std::filesystem::path> directories, std::size_t stores);

// Throws B2202 if this process may not write a file of this size: the kernel would kill it (RLIMIT_FSIZE).
void require_allowed(std::uint64_t file_bytes, const std::filesystem::path& directory);

}  // namespace ballast::offload
