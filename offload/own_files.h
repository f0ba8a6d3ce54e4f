// Files and directories of this process in places where other users may have left links and files of the same names.
#pragma once

#include <filesystem>

namespace ballast::offload {

// Opens a file to write to it, as open() with these flags does; a new one is readable by its user only. Throws B2206, and leaves
// the file as it is, if it is a link, a hard link or no regular file, or if it belongs to another user and this process is not
// root's. Throws B3201 for other failures.
int open_own_file(const std::filesystem::path& path, int flags);

// Throws B2206 if the directory is a link, belongs to another user, or can be written to by all users.
void require_own_directory(const std::filesystem::path& directory);

}  // namespace ballast::offload
