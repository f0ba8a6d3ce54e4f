// The memory that a program needs in each tier: the sum of its slots. The engine reserves exactly these bytes.
#pragma once

#include <array>

#include "zero/plan/block.h"
#include "zero/plan/program.h"

namespace ballast {

struct LedgerEntry {
  Tier tier = Tier::device;
  std::string owner;  // "gathered", "reduced", "state": the names of slots' roles
  std::size_t bytes = 0;

  bool operator==(const LedgerEntry&) const = default;
};

using Ledger = std::vector<LedgerEntry>;  // by tier, the largest owner first
using TierBytes = std::array<std::size_t, tier_count>;

Ledger ledger_of(const Program& program, const RecordSizes& records);
std::size_t bytes_in(const Ledger& ledger, Tier tier);
TierBytes bytes_by_tier(const Ledger& ledger);
std::string to_text(const Ledger& ledger);  // a table

}  // namespace ballast
