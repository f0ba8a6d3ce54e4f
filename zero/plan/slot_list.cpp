#include "zero/plan/slot_list.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/runtime/host_pages.h"
#include "kernels/runtime/round_up.h"

namespace ballast {

std::size_t SlotList::add(SlotRole role, Tier tier, std::size_t bytes, std::string_view which) {
  all_.push_back(
      {role, which.empty() ? std::string(name(role)) : fmt::format("{}.{}", name(role), which), tier, bytes});
  return all_.size() - 1;
}

Ring SlotList::add_ring(SlotRole role, Tier tier, std::size_t slots, std::size_t bytes) {
  if (slots * bytes == 0) return {};
  const std::size_t first = all_.size();
  for (std::size_t i = 0; i < slots; ++i) {
    add(role, tier, bytes, std::to_string(i));
  }
  return {{first, 0, bytes}, slots};
}

// A record alone is often too small for huge pages. A drive takes a request of 2 MiB from a huge page, but only 1 MiB
// at a time from small pages. The latter holds for all of a queue's memory if some of it has small pages: a drive that
// was measured reached 1.5 GB/s instead of 2.7.
Ring SlotList::add_records(SlotRole role, std::size_t records, std::size_t bytes) {
  if (records * bytes == 0) return {};
  const bool huge = records * bytes >= 2 * huge_page_bytes;
  const std::size_t together = round_up(records * bytes, huge ? huge_page_bytes : 1);
  return {{add(role, Tier::host, together), 0, bytes}, records, true};
}

std::vector<Piece> SlotList::add_pieces(const TilePieces& pieces, const std::vector<Tier>& state,
                                        std::string_view which) {
  std::vector<Piece> by_tile(state.size());
  const auto tiles = static_cast<std::size_t>(std::ranges::count(state, pieces.state_tier));
  if (tiles * pieces.bytes == 0) return by_tile;
  const std::size_t slot = add(pieces.role, pieces.tier, tiles * pieces.bytes, which);
  std::size_t begin = 0;
  for (std::size_t tile = 0; tile < state.size(); ++tile) {
    if (state[tile] != pieces.state_tier) continue;
    by_tile[tile] = {slot, begin, pieces.bytes};
    begin += pieces.bytes;
  }
  return by_tile;
}

}  // namespace ballast
