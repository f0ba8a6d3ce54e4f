// Small text files with a seal, which are complete or absent after a crash or power loss at any moment.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace ballast::offload {

// Writes `text`, which ends with a newline, and a line with its seal. Replaces an existing file. The file is durable
// when this returns.
void write_sealed_text(const std::filesystem::path& path, std::string_view text);

// Returns the text; nothing if the file is missing or its seal is wrong.
std::optional<std::string> read_sealed_text(const std::filesystem::path& path);

}  // namespace ballast::offload
