// The data that the parts of the compiler share: the input, facts about it, and the list of operations that they add
// to.
#pragma once

#include "zero/plan/builder.h"
#include "zero/plan/step_slots.h"

namespace ballast {

struct CompileContext {
  const CompileInput& input;
  const Uses& uses;  // operations are emitted for these
  StepSlots& slots;
  Builder& builder;
  bool off_plan = false;  // the uses to come are unknown, so nothing is done ahead

  const Trace& trace() const { return uses.trace(); }
  std::size_t units() const { return input.model.units.size(); }
  std::size_t width(std::size_t unit) const { return byte_size(input.model.units[unit].dtype); }  // of a parameter
  std::size_t width_of_sums(std::size_t unit) const { return byte_size(input.dtype_of_sums(unit)); }
  const UnitLayout& layout(std::size_t unit) const { return input.layout.units[unit]; }
  const UnitResidence& residence(std::size_t unit) const { return slots.residence(unit); }
};

}  // namespace ballast
