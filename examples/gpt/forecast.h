// Forecasts the time of a step with the simulator, from the rates of this machine and the time of one block's
// arithmetic.
#pragma once

#include "examples/gpt/run.h"

namespace ballast::gpt {

// All ranks call it together, each with the plan of its training. For CPUs only.
Forecast forecast(const RunOptions& options, const Plan& plan, Communicator& world, Maths& maths);

}  // namespace ballast::gpt
