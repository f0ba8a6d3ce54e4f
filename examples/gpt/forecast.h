// What a step will take, told before it is trained: by the simulator, from this machine's rates and the time that a block's
// arithmetic takes.
#pragma once

#include "examples/gpt/run.h"

namespace ballast::gpt {

// All ranks together, each with the plan of its training. On CPUs.
Forecast forecast(const RunOptions& options, const Plan& plan, Communicator& world, Maths& maths);

}  // namespace ballast::gpt
