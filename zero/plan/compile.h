// Turns a model, its layout and a placement into the program of a training step. Pure: no threads, clock, CUDA or files.
#pragma once

#include "zero/plan/compile_input.h"

namespace ballast {

// A round in which the trainer has left the program's order.
struct DepartedRound {
  Trace visits{};              // so far, of all micro-steps
  std::size_t by_program = 0;  // the first of them, which the program's operations made
};

// Throws what cannot be, before anything else: see check() of models and placements.
Program compile(const CompileInput& input);

// What such a round does instead of the rest of the program, in the program's slots: a list for each use, with what is held
// together, and one for the step. Each begins when everything before it is over and does nothing ahead. After the last one
// comes the program's entry. Throws B1007 for a unit that has been updated already, B2004 for one that finds no room.
std::vector<Op> compile_visits(const CompileInput& input, const DepartedRound& step, const Trace& chain);
std::vector<Op> compile_step(const CompileInput& input, const DepartedRound& step);

// A program without operations: what memory it would take, in a small part of the time.
Program outline(const CompileInput& input);

}  // namespace ballast
