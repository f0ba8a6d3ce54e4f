// The memory in which parameters and state lie between steps.
#pragma once

#include "zero/plan/step_slots.h"

namespace ballast {

std::vector<Home> homes_of(const CompileInput& input, const StepSlots& slots);

}  // namespace ballast
