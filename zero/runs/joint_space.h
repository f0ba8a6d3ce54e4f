// Checks that what all ranks of a machine are about to write fits on its drives.
#pragma once

#include <ballast/comm.h>

#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "offload/record_format.h"

namespace ballast {

// A name of this machine that all of its ranks have, those in containers too; unknown_machine if the system does not tell it.
inline constexpr std::string_view unknown_machine = "?";
std::string booted_machine();

// Throws B2202 on all ranks if the stores that they are about to make do not fit on a drive together: alone, each of them would
// see all of its free space. `stores`: of this shape, each striped over the directories; 0: this rank makes none. All ranks
// call it together, before any of them writes.
void require_joint_space(Communicator& world, const offload::RecordShape& shape,
                         std::span<const std::filesystem::path> directories, std::size_t stores);

}  // namespace ballast
