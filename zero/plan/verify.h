// Proves a program: follows every byte through two steps, and finds bytes that are used too early, too late, twice or
// never. It shares no code with the compiler, because a verifier that shares code with what it checks shares its
// faults.
#pragma once

#include "zero/plan/compile_input.h"

namespace ballast {

// Returns the faults, a line each. `input` is what the program was compiled from. Meant for programs of a few thousand
// operations: time and memory grow with the square of their number.
std::vector<std::string> verify(const CompileInput& input, const Program& program);

}  // namespace ballast
