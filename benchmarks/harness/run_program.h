// The common end of every benchmark's main().
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace ballast::benchmarks {

// Parses the arguments, calls `run`, and prints errors. Returns the exit code: 0, or 2 for wrong arguments and errors.
int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& run);

}  // namespace ballast::benchmarks
