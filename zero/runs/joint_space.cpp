#include "zero/runs/joint_space.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <vector>

#include "kernels/runtime/sizes.h"
#include "kernels/runtime/system_files.h"
#include "offload/preflight.h"
#include "zero/comm/on_all_ranks.h"

namespace ballast {
namespace {

constexpr std::size_t most_ranks_named = 16;

// One drive of one machine.
struct SharedDrive {
  std::string directory{};  // the directory of the first rank
  std::uint64_t needed = 0;
  std::uint64_t available = UINT64_MAX;
  std::vector<std::size_t> ranks{};
};
using Drives = std::map<std::pair<std::string, std::uint64_t>, SharedDrive>;  // the key is machine and device

// The first line names the machine; each other one has the device, the bytes needed and available, and a directory.
std::string text_of(std::span<const offload::SpaceNeed> needs) {
  std::string text = booted_machine() + '\n';
  for (const auto& [device, directory, needed, available] : needs)
    text += fmt::format("{} {} {} {}\n", device, needed, available, directory.string());
  return text;
}

void add(Drives& drives, const std::string& text, std::size_t rank) {
  const std::vector<std::string> lines = lines_of(text);
  const std::string machine = lines[0] == unknown_machine ? fmt::format("that of rank {}", rank) : lines[0];
  for (std::size_t i = 1; i < lines.size(); ++i) {
    std::istringstream line(lines[i]);
    std::uint64_t device = 0, needed = 0, available = 0;
    std::string directory;
    line >> device >> needed >> available;
    line.ignore();
    std::getline(line, directory);
    SharedDrive& drive = drives[{machine, device}];
    if (drive.ranks.empty()) drive.directory = directory;
    drive.needed += needed;
    drive.available = std::min(drive.available, available);
    drive.ranks.push_back(rank);
  }
}

std::string list_of(std::vector<std::size_t> ranks) {
  const std::size_t more = ranks.size() - std::min(ranks.size(), most_ranks_named);
  ranks.resize(ranks.size() - more);
  const std::string listed = fmt::format("{}", fmt::join(ranks, ", "));
  return more == 0 ? listed : fmt::format("{} and {} more", listed, more);
}

}  // namespace

std::string booted_machine() {
  return read_text("/proc/sys/kernel/random/boot_id").value_or(std::string(unknown_machine));
}

void require_joint_space(Communicator& world, const offload::RecordShape& shape,
                         std::span<const std::filesystem::path> directories, std::size_t stores) {
  std::string mine;
  on_all_ranks(world, [&] {
    mine = text_of(stores == 0 ? std::vector<offload::SpaceNeed>{} : space_needs(shape, directories, stores));
  });
  Drives drives;
  const std::vector<std::string> texts = texts_of_all(world, mine);
  for (std::size_t rank = 0; rank < texts.size(); ++rank)
    add(drives, texts[rank], rank);
  for (const auto& entry : drives) {
    const SharedDrive& drive = entry.second;
    require(drive.needed <= drive.available, Code::drive_full, [&] {
      const bool is_shared = drive.ranks.size() > 1;
      return Problem{
          .what = fmt::format("cannot make the state's files: the drive has too little space{}",
                              is_shared ? " for all ranks that use it" : ""),
          .where = fmt::format("{} (rank{} {})", drive.directory, is_shared ? "s" : "", list_of(drive.ranks)),
          .needed = is_shared ? fmt::format("{} for {} ranks", human_bytes(drive.needed), drive.ranks.size())
                              : human_bytes(drive.needed),
          .available = human_bytes(drive.available)};
    });
  }
}

}  // namespace ballast
