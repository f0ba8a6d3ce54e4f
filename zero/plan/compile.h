// Turns a model, its layout and a placement into the program of a training step. Pure: no threads, clock, CUDA or
// files.
#pragma once

#include "zero/plan/compile_input.h"

namespace ballast {

// An off-plan step: one in which the trainer has left the program's order.
struct OffPlanStep {
  Trace visits{};              // so far, in all micro-steps
  std::size_t by_program = 0;  // how many of them, from the first on, the program's operations served
};

// Calls check(), which may throw, before anything else.
Program compile(const CompileInput& input);

// Return the operations of an off-plan step, which replace the rest of the program, in the program's slots: a list for
// each use, with the units that are held together, and one for the end of the step. A list begins when everything
// before it is over, and does nothing ahead. After the last one the engine runs the program's entry. Throw B1007 for a
// unit that has been updated already, B2004 for a unit that does not fit.
std::vector<Op> compile_visits(const CompileInput& input, const OffPlanStep& step, const Trace& chain);
std::vector<Op> compile_step(const CompileInput& input, const OffPlanStep& step);

// Returns the program without its operations, for callers that need its memory only. Takes much less work.
Program outline(const CompileInput& input);

}  // namespace ballast
