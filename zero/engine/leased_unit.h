// The memory of a unit while it is leased.
#pragma once

#include <ballast/lease.h>

#include "zero/plan/layout.h"

namespace ballast {

struct LeasedUnit {
  std::size_t number = 0;
  const Unit* unit = nullptr;
  const UnitLayout* layout = nullptr;
  ConstView parameters{};  // all of it, as it is laid out
  bool backward = false;
  View gradients{};  // gradients of its trained tensors in backward, zeroed, to be added to
};

}  // namespace ballast
