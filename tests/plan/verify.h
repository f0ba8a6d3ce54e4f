// Proves a program: follows every byte through two steps, and finds bytes that are used too early, too late, twice or
// never. It shares no code with the compiler, because a verifier that shares code with what it checks shares its
// faults.
#pragma once

#include "zero/plan/compile_input.h"

namespace ballast {

// Returns the faults, a line each. `input` is what the program was compiled from. Meant for programs of a few thousand
// operations: time and memory grow with the square of their number.
std::vector<std::string> verify(const CompileInput& input, const Program& program);

// Return its two parts: operations that begin before others are over that they have to wait for, by waits and by the order of
// lanes; and operations that do not find the bytes that they have to find.
std::vector<std::string> wrong_order(const Program& program);
std::vector<std::string> wrong_bytes(const CompileInput& input, const Program& program);

}  // namespace ballast
