#include "zero/plan/trace.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace ballast {

Trace visits_of(const Model& model, std::size_t unit, Phase phase, bool exact) {
  Trace visits;
  for (const Tie& tie : model.units[unit].ties) {
    const Visit owner{tie.unit, phase, true, exact};
    if (std::ranges::find(visits, owner) == visits.end()) visits.push_back(owner);
  }
  visits.push_back({unit, phase, false, exact});
  return visits;
}

Trace declared_order(const Model& model) {
  Trace trace;
  const auto use = [&](std::size_t unit, Phase phase) {
    const Trace visits = visits_of(model, unit, phase);
    trace.insert(trace.end(), visits.begin(), visits.end());
  };
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    use(unit, Phase::forward);
  }
  for (std::size_t unit = model.units.size(); unit-- > 0;) {
    use(unit, Phase::backward);
  }
  return trace;
}

Uses::Uses(Trace trace, std::size_t units)
    : trace_(std::move(trace)), positions_(units), backward_(units, 0), last_backward_(units, none) {
  for (std::size_t i = 0; i < trace_.size(); ++i) {
    const Visit& visit = trace_[i];
    require(visit.unit < units && visit.phase != Phase::step, Code::bad_argument, [&] {
      return Problem{.what = fmt::format("a trace visits unit {} in {}", visit.unit, name(visit.phase)),
                     .needed = fmt::format("a unit below {} in forward or backward", units)};
    });
    positions_[visit.unit].push_back(i);
    has_forward_ = has_forward_ || visit.phase == Phase::forward;
    if (visit.phase == Phase::backward) {
      ++backward_[visit.unit];
      last_backward_[visit.unit] = i;
    }
  }
}

std::size_t Uses::next(std::size_t unit, std::size_t from) const {
  const std::vector<std::size_t>& positions = positions_[unit];
  if (positions.empty()) return none;
  const std::size_t step = from / trace_.size();
  const auto at = std::ranges::lower_bound(positions, from % trace_.size());
  return at != positions.end() ? step * trace_.size() + *at : (step + 1) * trace_.size() + positions.front();
}

std::size_t Uses::end_of_chain(std::size_t position) const {
  while (position < trace_.size() && trace_[position].held)
    ++position;
  return position + 1;
}

std::size_t Uses::end_of_units(std::size_t position, std::size_t further, std::size_t end) const {
  const auto unit_at = [&](std::size_t i) { return trace_[i % trace_.size()].unit; };
  std::size_t units = 0;
  for (std::size_t i = position + 1; i < end; ++i) {
    if (unit_at(i) != unit_at(i - 1) && ++units > further) return i;
  }
  return end;
}

std::vector<std::size_t> Uses::by_first_visit() const {
  std::vector<std::size_t> units(positions_.size());
  std::iota(units.begin(), units.end(), std::size_t{0});
  std::ranges::stable_sort(units, {}, [&](std::size_t unit) { return next(unit, 0); });
  return units;
}

}  // namespace ballast
