// Proves a program: follows every byte through two rounds and finds what is used too early, too late, twice or never.
// Knows nothing of how programs are made, so it doubts all of them alike.
#pragma once

#include "zero/plan/compile.h"

namespace ballast {

// What is wrong, a line each; empty if nothing is. `input` is what the program was compiled from. For programs of a few
// thousand operations: time and memory grow with their square.
std::vector<std::string> verify(const CompileInput& input, const Program& program);

}  // namespace ballast
