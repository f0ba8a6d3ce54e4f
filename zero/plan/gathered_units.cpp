#include "zero/plan/gathered_units.h"

#include <algorithm>

namespace ballast {
namespace {

using Places = std::vector<GatheredUnits::Place>;

// Pieces begin where GPUs and wide CPU instructions like them to.
constexpr std::size_t alignment = 256;

std::size_t aligned(std::size_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

// Where a gap of this size begins, and before which place.
std::optional<std::pair<std::size_t, Places::const_iterator>> first_gap(const Places& places, std::size_t bytes,
                                                                        std::size_t end) {
  std::size_t begin = 0;
  for (auto place = places.begin(); place != places.end(); ++place) {
    if (begin + bytes <= place->begin) return {{begin, place}};
    begin = aligned(place->end);
  }
  if (begin + bytes <= end) return {{begin, places.end()}};
  return {};
}

}  // namespace

std::optional<std::size_t> GatheredUnits::find(std::size_t unit) const {
  const auto place = std::ranges::find(places_, unit, &Place::unit);
  if (place == places_.end()) return {};
  return place->begin;
}

std::optional<std::size_t> GatheredUnits::place(std::size_t unit, std::size_t bytes, std::size_t now,
                                                std::size_t position) {
  Places places = places_;
  while (true) {
    if (const auto gap = first_gap(places, bytes, bytes_)) {
      places.insert(gap->second, {unit, gap->first, gap->first + bytes});
      places_ = std::move(places);
      return gap->first;
    }
    const auto next_use = [&](const Place& place) { return uses_.next(place.unit, now); };
    const auto farthest = std::ranges::max_element(places, {}, next_use);
    if (farthest == places.end() || next_use(*farthest) <= position) return {};
    places.erase(farthest);
  }
}

void GatheredUnits::drop(std::size_t unit) {
  std::erase_if(places_, [&](const Place& place) { return place.unit == unit; });
}

}  // namespace ballast
