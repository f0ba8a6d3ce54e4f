// Whether records will fit, asked before anything is written.
#pragma once

#include <filesystem>
#include <span>

#include "offload/record_format.h"

namespace ballast::offload {

// Refuses (B2202) what would not fit into the directories, several of which may share a drive: `stores` of this shape, each
// in all of them.
void require_space(const RecordShape& shape, std::span<const std::filesystem::path> directories, std::size_t stores);

}  // namespace ballast::offload
