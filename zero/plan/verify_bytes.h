// Follows every byte of a program through two steps, and compares what each operation finds with what it has to find.
#pragma once

#include "zero/plan/compile_input.h"

namespace ballast {

std::vector<std::string> wrong_bytes(const CompileInput& input, const Program& program);

}  // namespace ballast
