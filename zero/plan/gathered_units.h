// The units that are gathered at one time, and their position in the memory for them. The order of all uses is known,
// so Belady's rule decides: the unit whose next use is farthest away is dropped.
#pragma once

#include <optional>

#include "kernels/runtime/round_up.h"
#include "zero/plan/trace.h"

namespace ballast {

class GatheredUnits {
 public:
  struct Extent {
    std::size_t unit = 0;
    std::size_t begin = 0;
    std::size_t end = 0;
    bool exact = false;  // see Visit::exact
  };

  GatheredUnits(std::size_t bytes, const Uses& uses) : bytes_(bytes), uses_(uses) {}

  // Returns the bytes that a unit's parameters take, so that the next unit's are aligned.
  static std::size_t aligned(std::size_t bytes) { return round_up(bytes, alignment); }

  std::optional<Extent> find(std::size_t unit) const;  // none: it is not gathered

  // Makes room for a unit that is used at `position`, by dropping units that are used later. Drops nothing and returns
  // none if the units that are used between `now` and then leave no room.
  std::optional<std::size_t> make_room(std::size_t unit, std::size_t bytes, std::size_t now, std::size_t position);

  bool has_gap(std::size_t bytes) const;  // whether there is room while all units stay

  void drop(std::size_t unit);  // its parameters have changed, or soon will
  void clear() { extents_.clear(); }

 private:
  static constexpr std::size_t alignment = 256;  // for GPUs and wide CPU instructions

  std::size_t bytes_;
  const Uses& uses_;
  std::vector<Extent> extents_;  // in the order of memory
};

}  // namespace ballast
