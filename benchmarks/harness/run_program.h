// What every benchmark's main() ends with.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace ballast::benchmarks {

// Reads the arguments, runs, and says what went wrong. The exit code: 0, or 2 for wrong arguments and errors.
int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& run);

}  // namespace ballast::benchmarks
