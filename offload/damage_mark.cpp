#include "offload/damage_mark.h"

#include <fstream>

namespace ballast::offload {
namespace {

std::filesystem::path mark_of(const std::filesystem::path& records) { return records.string() + ".damaged"; }

}  // namespace

bool is_marked_damaged(const std::filesystem::path& records) {
  std::error_code unknown;
  return std::filesystem::exists(mark_of(records), unknown);
}

void mark_damaged(const std::filesystem::path& records) noexcept { std::ofstream(mark_of(records)); }

void remove_damage_mark(const std::filesystem::path& records) noexcept {
  std::error_code none_there;
  std::filesystem::remove(mark_of(records), none_there);
}

}  // namespace ballast::offload
