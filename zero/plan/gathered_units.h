// Which units are gathered at which time, and where in the memory for them: planned with the whole order of uses known, so
// by Belady's rule. What must go is what is used farthest in the future.
#pragma once

#include <optional>

#include "zero/plan/trace.h"

namespace ballast {

class GatheredUnits {
 public:
  struct Extent {
    std::size_t unit = 0;
    std::size_t begin = 0;
    std::size_t end = 0;
  };

  GatheredUnits(std::size_t bytes, const Uses& uses) : bytes_(bytes), uses_(uses) {}

  std::optional<std::size_t> find(std::size_t unit) const;  // where it begins, if it is there

  // Finds room for a unit that is used at `position`, by dropping units that are used later than that. None if units that
  // are used before, from `now` on, leave no room; then all stay.
  std::optional<std::size_t> make_room(std::size_t unit, std::size_t bytes, std::size_t now, std::size_t position);

  void drop(std::size_t unit);  // its parameters have changed, or soon will
  void clear() { extents_.clear(); }

 private:
  std::size_t bytes_;
  const Uses& uses_;
  std::vector<Extent> extents_;  // in order of memory
};

}  // namespace ballast
