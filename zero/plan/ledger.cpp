#include "zero/plan/ledger.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/runtime/sizes.h"

namespace ballast {
namespace {

void add(Ledger& ledger, Tier tier, std::string_view owner, std::size_t bytes) {
  if (bytes == 0) return;
  const auto entry =
      std::ranges::find_if(ledger, [&](const LedgerEntry& e) { return e.tier == tier && e.owner == owner; });
  if (entry == ledger.end()) {
    ledger.push_back({tier, std::string(owner), bytes});
  } else {
    entry->bytes += bytes;
  }
}

// Puts near tiers first, and the largest owner of each first.
void sort(Ledger& ledger) {
  std::ranges::stable_sort(ledger, [](const LedgerEntry& a, const LedgerEntry& b) {
    return a.tier != b.tier ? a.tier < b.tier : a.bytes > b.bytes;
  });
}

}  // namespace

Ledger ledger_of(const Program& program, const RecordSizes& records) {
  Ledger ledger;
  for (const Slot& slot : program.slots) {
    add(ledger, slot.tier, name(slot.role), slot.bytes);
  }
  const auto tiles = [&](bool frozen) {
    return static_cast<std::size_t>(
        std::ranges::count_if(program.homes, [&](const Home& home) { return home.on_drive && home.frozen == frozen; }));
  };
  const std::size_t on_drive = tiles(false) * records.places * records.record;
  add(ledger, Tier::nvme, "records", on_drive);
  add(ledger, Tier::nvme, "frozen", tiles(true) * records.frozen);
  const bool is_mirrored = std::ranges::find(program.slots, SlotRole::mirror, &Slot::role) != program.slots.end();
  if (is_mirrored) add(ledger, Tier::nvme, "mirror", on_drive);  // another rank's records
  sort(ledger);
  return ledger;
}

Ledger together(Ledger one, const Ledger& other) {
  for (const auto& [tier, owner, bytes] : other)
    add(one, tier, owner, bytes);
  sort(one);
  return one;
}

std::size_t bytes_in(const Ledger& ledger, Tier tier) { return bytes_by_tier(ledger)[static_cast<std::size_t>(tier)]; }

TierBytes bytes_by_tier(const Ledger& ledger) {
  TierBytes bytes{};
  for (const LedgerEntry& entry : ledger) {
    bytes[static_cast<std::size_t>(entry.tier)] += entry.bytes;
  }
  return bytes;
}

std::string to_text(const Ledger& ledger) {
  std::string text;
  for (std::size_t i = 0; i < tier_count; ++i) {
    const Tier tier = static_cast<Tier>(i);
    if (bytes_in(ledger, tier) == 0) continue;
    text += fmt::format("{:<8}{:<14}{:>12}\n", name(tier), "", human_bytes(bytes_in(ledger, tier)));
    for (const LedgerEntry& entry : ledger) {
      if (entry.tier == tier) text += fmt::format("        {:<14}{:>12}\n", entry.owner, human_bytes(entry.bytes));
    }
  }
  return text;
}

}  // namespace ballast
