// Small text files that are there as a whole or not at all, whenever a process or the power ends.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace ballast::offload {

// Writes `text`, whose last line ends, and a line with its seal. On the drive, under its name, when this returns; a file that
// was there before is replaced.
void write_sealed_text(const std::filesystem::path& path, std::string_view text);

// What was written. None where there is no such file, or one with other bytes.
std::optional<std::string> read_sealed_text(const std::filesystem::path& path);

}  // namespace ballast::offload
