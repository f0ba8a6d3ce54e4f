#pragma once

#include <string>

namespace ballast::benchmarks {

// What a program of others prints on stdout, when it has ended. The command is the shell's.
std::string output_of(const std::string& command);

}  // namespace ballast::benchmarks
