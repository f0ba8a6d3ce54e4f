// The command line of the program.
#pragma once

#include <CLI/CLI.hpp>

#include "examples/gpt/run.h"

namespace ballast::gpt {

struct ProgramOptions {
  RunOptions run{};
  std::size_t ranks = 1;  // threads of this process
  int threads = 0;        // threads of each rank; 0: its share of the cores
  std::filesystem::path timeline{};
  std::filesystem::path losses{};
  std::filesystem::path json{};
  std::filesystem::path save{};
};

void describe(CLI::App& app, ProgramOptions& options);

}  // namespace ballast::gpt
