// Names for files that have one only until they are unlinked, a moment after they are made.
#pragma once

#include <filesystem>
#include <string>

namespace ballast::offload {

std::string scratch_name();  // another one with each call

// Removes what a crash in that moment has left. Taking the name from a file that somebody makes just now does no harm.
// Returns how many there were.
std::size_t remove_stale_scratch(const std::filesystem::path& directory);

}  // namespace ballast::offload
