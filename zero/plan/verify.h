// Proves a program: follows every byte through two steps, and finds bytes that are used too early, too late, twice or never.
// It shares no code with the compiler, because a verifier that shares code with what it checks shares its faults.
#pragma once

#include "zero/plan/compile_input.h"

namespace ballast {

// What is wrong, a line each; empty if nothing is. `input` is what the program was compiled from. For programs of a few
// thousand operations: time and memory grow with their square.
std::vector<std::string> verify(const CompileInput& input, const Program& program);

}  // namespace ballast
