#pragma once

#include <string>

namespace ballast::benchmarks {

// Runs a shell command to its end, and returns its standard output.
std::string output_of(const std::string& command);

}  // namespace ballast::benchmarks
