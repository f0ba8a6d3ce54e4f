#include "zero/plan/gathered_memory.h"

#include <algorithm>
#include <set>
#include <span>

namespace ballast {
namespace {

std::size_t bytes_of(std::span<const Visit> visits, const std::vector<std::size_t>& unit_bytes) {
  std::set<std::size_t> units;
  std::size_t bytes = 0;
  for (const Visit& visit : visits) {
    if (units.insert(visit.unit).second) bytes += unit_bytes[visit.unit];
  }
  return bytes;
}

}  // namespace

std::size_t longest_chain(const Model& model, const Uses& uses) {
  std::size_t longest = 1;
  for (std::size_t i = 0; i < uses.trace().size(); ++i) {
    longest = std::max(longest, uses.end_of_chain(i) - i);
  }
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    longest = std::max(longest, visits_of(model, unit, Phase::forward).size());
  }
  return longest;
}

std::size_t bytes_to_gather(const Model& model, const Uses& uses, std::size_t prefetch,
                            const std::vector<std::size_t>& unit_bytes) {
  const std::span<const Visit> trace = uses.trace();
  std::size_t most = 0;
  for (std::size_t i = 0; i < trace.size(); ++i) {
    const std::size_t prefetched = uses.end_of_units(i, prefetch, trace.size());
    const std::size_t end = std::max(prefetched, std::min(uses.end_of_chain(i), trace.size()));
    most = std::max(most, bytes_of(trace.subspan(i, end - i), unit_bytes));
  }
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    most = std::max(most, bytes_of(visits_of(model, unit, Phase::forward), unit_bytes));
  }
  return most;
}

}  // namespace ballast
