#include "zero/plan/gathered_units.h"

#include <algorithm>

namespace ballast {
namespace {

using Extents = std::vector<GatheredUnits::Extent>;

// The beginning of the first gap of this size, and the extent after it.
std::optional<std::pair<std::size_t, Extents::const_iterator>> first_gap(const Extents& extents, std::size_t bytes,
                                                                         std::size_t end) {
  std::size_t begin = 0;
  for (auto extent = extents.begin(); extent != extents.end(); ++extent) {
    if (begin + bytes <= extent->begin) return {{begin, extent}};
    begin = GatheredUnits::aligned(extent->end);
  }
  if (begin + bytes <= end) return {{begin, extents.end()}};
  return {};
}

}  // namespace

std::optional<GatheredUnits::Extent> GatheredUnits::find(std::size_t unit) const {
  const auto extent = std::ranges::find(extents_, unit, &Extent::unit);
  if (extent == extents_.end()) return {};
  return *extent;
}

std::optional<std::size_t> GatheredUnits::make_room(std::size_t unit, std::size_t bytes, std::size_t now,
                                                    std::size_t position) {
  Extents extents = extents_;
  while (true) {
    if (const auto gap = first_gap(extents, bytes, bytes_)) {
      const bool exact = uses_.trace()[position % uses_.trace().size()].exact;
      extents.insert(gap->second, {unit, gap->first, gap->first + bytes, exact});
      extents_ = std::move(extents);
      return gap->first;
    }
    const auto next_use = [&](const Extent& extent) { return uses_.next(extent.unit, now); };
    const auto farthest = std::ranges::max_element(extents, {}, next_use);
    if (farthest == extents.end() || next_use(*farthest) <= position) return {};
    extents.erase(farthest);
  }
}

bool GatheredUnits::has_gap(std::size_t bytes) const { return first_gap(extents_, bytes, bytes_).has_value(); }

void GatheredUnits::drop(std::size_t unit) {
  std::erase_if(extents_, [&](const Extent& extent) { return extent.unit == unit; });
}

}  // namespace ballast
