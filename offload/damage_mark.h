// A mark next to a record file: a read of it has failed, so the next start looks for another copy.
#pragma once

#include <filesystem>

namespace ballast::offload {

bool is_marked_damaged(const std::filesystem::path& records);
void mark_damaged(const std::filesystem::path& records) noexcept;  // as far as the drive can: nothing depends on it
void remove_damage_mark(const std::filesystem::path& records) noexcept;

}  // namespace ballast::offload
