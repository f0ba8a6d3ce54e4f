// Names for files that are unlinked directly after they are created.
#pragma once

#include <filesystem>
#include <string>

namespace ballast::offload {

std::string scratch_name();  // a new name at each call

// Removes such names that a crash has left, and returns how many it removed. It is harmless to remove the name of a
// file that another process is creating.
std::size_t remove_stale_scratch(const std::filesystem::path& directory);

}  // namespace ballast::offload
